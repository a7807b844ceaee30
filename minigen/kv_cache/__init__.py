"""The KV cache: blocks, block tables, paged storage, prefix caching."""
