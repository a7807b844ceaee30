"""A learner's parts, written against the sockets alone: this file does not import minigen."""

import math

import torch


class QueueScheduler:
    """First come, first served: whole prompts, then one token per sequence and step."""

    def __init__(self, manager, max_num_seqs, max_num_batched_tokens):
        self.manager, self.max_num_batched_tokens = manager, max_num_batched_tokens
        self.waiting, self.running = [], []

    def add(self, sequence):
        self.waiting.append(sequence)

    def schedule(self):
        batch, room = [], self.max_num_batched_tokens
        for sequence in self.running:
            if self.manager.allocate_slots(sequence, 1):
                batch.append((sequence, 1))
                room -= 1
        while self.waiting and len(self.waiting[0]) <= room:
            num_tokens = self.manager.allocate(self.waiting[0], len(self.waiting[0]))
            if num_tokens == 0:
                break
            self.running.append(self.waiting.pop(0))
            batch.append((self.running[-1], num_tokens))
            room -= num_tokens
        return batch

    def commit(self, chunks, tokens):
        for chunk, token in zip(chunks, tokens, strict=True):
            self.manager.mark_computed(chunk.sequence, chunk.num_tokens)
            chunk.sequence.append(token.token_id)
            if chunk.sequence.finish_reason is not None:
                self.abort(chunk.sequence)

    def abort(self, sequence):
        self.manager.free(sequence)
        for queue in (self.waiting, self.running):
            if sequence in queue:
                queue.remove(sequence)


class LowestFirst:
    """Counts owners in a dict, and allocates the lowest free ids."""

    def __init__(self, num_blocks):
        self.owners = dict.fromkeys(range(1, num_blocks + 1), 0)

    def __len__(self):
        return len(self.owners) - self.num_free

    @property
    def num_free(self):
        return list(self.owners.values()).count(0)

    def allocate(self, count):
        free = [block_id for block_id, owners in self.owners.items() if owners == 0][:count]
        self.share(free)
        return free

    def share(self, block_ids):
        for block_id in block_ids:
            self.owners[block_id] += 1

    def release(self, block_ids):
        for block_id in block_ids:
            self.owners[block_id] -= 1
        return [block_id for block_id in block_ids if self.owners[block_id] == 0]

    def num_owners(self, block_id):
        return self.owners[block_id]


class HashChain:
    """Blocks by all tokens up to their end; evicts unused blocks, the longest chains first."""

    def __init__(self, allocator, block_size):
        self.allocator, self.block_size = allocator, block_size
        self.known = {}

    @property
    def num_evictable(self):
        return len(self.unused())

    def unused(self):
        owners = self.allocator.num_owners
        return [path for path, block_id in self.known.items() if owners(block_id) == 1]

    def path(self, token_ids, index, salt):
        return (salt, *token_ids[: (index + 1) * self.block_size])

    def match(self, token_ids, salt):
        found = []
        for index in range((len(token_ids) - 1) // self.block_size):
            block_id = self.known.get(self.path(token_ids, index, salt))
            if block_id is None:
                break
            found.append(block_id)
        self.allocator.share(found)
        return found

    def insert(self, token_ids, block_ids, first, salt):
        for index in range(first, len(token_ids) // self.block_size):
            path = self.path(token_ids, index, salt)
            if path not in self.known and block_ids[index] not in self.known.values():
                self.known[path] = block_ids[index]
                self.allocator.share([block_ids[index]])

    def acquire(self, block_ids):
        pass

    def release(self, block_ids):
        pass

    def evict(self, count):
        paths = sorted(self.unused(), key=len, reverse=True)[:count]
        evicted = [self.known.pop(path) for path in paths]
        self.allocator.release(evicted)
        return evicted


def likeliest(logits, sequences):
    """Return the likeliest token of each row, as a list of ints."""
    return [int(row.argmax()) for row in logits]


def likeliest_tensor(logits, sequences):
    """Return the same, as a tensor."""
    return logits.argmax(dim=-1)


class Likeliest:
    """The same, as a callable instance."""

    def __call__(self, logits, sequences):
        return likeliest(logits, sequences)


def plain_attention(pool, batch, windows):
    """Compute attention query by query, over the contents of the pool."""
    starts = batch.query_starts

    def attend(layer_id, q, k, v):
        pool.store(layer_id, k, v, batch.slots)
        mixed = torch.empty_like(q)
        for row, table in enumerate(batch.block_tables):
            keys, values = pool.gather(layer_id, table)
            repeats = q.shape[1] // keys.shape[1]
            for token in range(starts[row], starts[row + 1]):
                end = int(batch.context_lens[row]) - (starts[row + 1] - 1 - token)
                first = max(end - (windows[layer_id] or end), 0)
                seen = keys[first:end].transpose(0, 1).repeat_interleave(repeats, dim=0)
                scores = (seen @ q[token].unsqueeze(-1)).squeeze(-1) / math.sqrt(q.shape[-1])
                shown = values[first:end].transpose(0, 1).repeat_interleave(repeats, dim=0)
                mixed[token] = (scores.softmax(dim=-1).unsqueeze(1) @ shown).squeeze(1)
        return mixed

    return attend


class PlainAttention:
    """The same, as a class whose instances serve one step each."""

    def __init__(self, pool, batch, windows):
        self.attend = plain_attention(pool, batch, windows)

    def __call__(self, layer_id, q, k, v):
        return self.attend(layer_id, q, k, v)
