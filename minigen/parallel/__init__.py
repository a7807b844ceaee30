"""One model split over several processes, by layers or within them, and their messages."""
