"""What checks annotations and shapes in the tests: beartype, with an int accepted for a float."""

from beartype import BeartypeConf, beartype

checker = beartype(conf=BeartypeConf(is_pep484_tower=True))
