"""One model over several processes, cut by heads, layers or tokens, and their messages."""
