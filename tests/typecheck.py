"""The checker of annotations and shapes in the tests: beartype, but an int passes for a float."""

from beartype import BeartypeConf, beartype

checker = beartype(conf=BeartypeConf(is_pep484_tower=True))
