"""The KV cache: blocks, block tables, paged storage, shared prefixes."""
