"""Exercise by_hand of chapter 16 (warm-up, 5 points, about 15 minutes).

Work out ten numbers about four tokens, with pencil and paper, and return them by name. The
docstring lists them. Numbers that are not whole count as right within one percent.

Check it:     minigen check exercises/16_sampling/by_hand.py
With a hint:  minigen check exercises/16_sampling/by_hand.py --hint 1

Try it, in a notebook or a script, with `mine` as your part:

    from minigen.sampling.sampler import keep_top_p, apply_temperature
    import torch

    four = torch.tensor([[0.50, 0.30, 0.15, 0.05]]).log()
    half = apply_temperature(four, torch.tensor([0.5]))
    print("at temperature 1/2:", half.softmax(-1), "you said", mine()["A at temperature 1/2"])
    print("kept by top_p 0.9:", keep_top_p(half, torch.tensor([0.9], dtype=torch.float64)))

Harder: Below which temperature does top_p = 0.9 keep only A? Find it with a program of four
lines, and check it with `apply_temperature` and `keep_top_p` of `minigen.sampling.sampler`.
"""

# exercise: minigen_course.ch16_sampling.lesson.by_hand
def by_hand() -> dict[str, float]:
    """Return ten numbers about four tokens A, B, C, D, with probabilities 50, 30, 15, 5 percent.

    Their logits are the natural logarithms of these probabilities. Each setting stands alone, the
    others have no effect; a temperature applies before a cut.

    - "top_k for greedy": the top_k with which every temperature chooses as greedy does
    - "top_p without effect": the top_p that drops no token of any distribution
    - "min_p without effect": the min_p that drops no token of any distribution
    - "repetition_penalty without effect": the repetition_penalty that changes no logit
    - "A at temperature 1/2": the probability of A at this temperature
    - "A at endless temperature": what the probability of A tends to as the temperature grows
    - "kept by top_p 0.9": how many tokens are kept
    - "kept by top_p 0.9 at temperature 1/2": how many tokens are kept
    - "kept by min_p 0.2": how many tokens are kept
    - "B after frequency_penalty": the probability of B if B has occurred twice in the answer, the
      other tokens have not occurred, and frequency_penalty is ln 2 = 0.693
    """
    raise NotImplementedError  # your turn
