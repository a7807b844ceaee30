"""Exercise choose_cut of chapter 42 (stretch, 15 points, about 30 minutes).

Choose the cut of a decode step. t ranks share each matrix, p stages share the layers, and d
replicas share the sequences, with t · p · d = `num_devices`. Allowed is a cut if t divides
`kv_heads` and is a key of `all_reduce`, p is at most `layers`, and d is at most
`num_sequences`. A replica has b sequences, `num_sequences / d` rounded up, and each of its
devices must hold (`weight_bytes` + b · `cache_bytes`) / (t · p) bytes. It runs them as m =
min(p, b) micro-batches. A stage takes for one of these

(`weight_bytes` + b / m · `cache_bytes`) / (t · p · `bandwidth`) + 2 · `layers` / p ·
`all_reduce[t]`

seconds, and the step takes p times that, and p times `transfer` more if p is above 1. Return
(t, p, d) of the fastest step; of equally fast ones, the one with the smaller t, then the
smaller p. Return None if no cut fits.

Check it:     minigen check exercises/42_pipeline/choose_cut.py
With a hint:  minigen check exercises/42_pipeline/choose_cut.py --hint 1

Try it, in a notebook or a script, with `mine` as your part:

    from minigen_course.ch42_pipeline.reference import Devices, Model

    big = Model(layers=80, kv_heads=8, weight_bytes=141e9, cache_bytes=1.3e9)  # 4,096 tokens each
    sums = {"NVLink": 10e-6, "Ethernet": 300e-6}
    for name, latency in sums.items():
        devices = Devices(8, 72e9, 3350e9, {1: 0.0} | {t: latency for t in (2, 4, 8)}, 40e-6)
        for count in (1, 8, 64):
            print(f"{name:<9}{count:>3} sequences: t, p, d = {mine(big, devices, count)}")

Harder: Two goals pull in different directions: the time of a step, and the tokens per second of
all devices. Return all cuts of which no other one is better in both (the Pareto front), with a
number of sequences that is the largest that fits for each cut.
"""

# exercise: minigen_course.ch42_pipeline.reference.choose_cut
from minigen_course.ch42_pipeline.reference import Devices, Model


def choose_cut(model: Model, devices: Devices, num_sequences: int) -> tuple[int, int, int] | None:
    """Return the fastest cut of a decode step: ranks of a tensor split, stages, and replicas.

    t ranks, p stages and d replicas use all devices: t p d = `num_devices`. t divides the KV heads
    and is in `all_reduce`; p is at most the number of layers; d is at most the number of sequences.
    A replica has b sequences, d-th of all, rounded up, and must hold (weights + b caches) / (t p)
    on each device. It runs them as m micro-batches, the smaller of p and b, so a stage takes

        (weights + b / m caches) / (t p bandwidth) + 2 layers / p all_reduce[t]

    for one of them, and a step takes p times that, and p transfers if p is more than 1. Of equally
    fast cuts, the one with the smaller t, then the smaller p. None if no cut fits into the memory.
    """
    raise NotImplementedError  # your turn
