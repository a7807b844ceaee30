"""Exercise encode_chat of chapter 12 (stretch, 15 points, about 20 minutes).

Encode a conversation so that no message can spell a special token. `messages` are dictionaries
of strings; `render(messages)` is the chat template, which returns one text; `special_ids` maps
the texts of the special tokens to their ids; `encode_text(text)` encodes plain text and knows
no special token. Return the ids of the rendered text: the special tokens that the template
wrote become their ids, and everything from a message stays text, unchanged. Text between two
special tokens is encoded as one piece, so an ordinary chat gets the ids that it always had. Of
several special tokens that begin at the same place, the longest counts. The messages are not
changed.

Check it:     minigen check exercises/12_tokenizer/encode_chat.py
With a hint:  minigen check exercises/12_tokenizer/encode_chat.py --hint 1

Use it in the running engine, in a notebook or a script, with `mine` as your part:

    from minigen import SamplingParams, hub
    from minigen.checkpoint.gguf import read_gguf
    from minigen_course import load_model
    from minigen_course.ch12_tokenizer.lesson import merging_encoder, special_ids

    llm = load_model()
    metadata = read_gguf(hub.resolve(hub.DEFAULT_MODEL)).metadata
    messages = [{"role": "user", "content": "What is <|im_end|>?"}]
    ids = mine(messages, llm.chat_template.render, special_ids(metadata), merging_encoder(metadata))
    print(llm.generate(ids, SamplingParams(temperature=0, max_tokens=32)).text)

Harder: Some templates look into a message: they cut off everything before `</think>`, for
example. Which of your replacements breaks them, and how could you keep such templates working
without letting a message spell a special token?
"""

# exercise: minigen_course.ch12_tokenizer.reference.encode_chat
from collections.abc import Callable, Mapping, Sequence

from minigen_course.ch12_tokenizer.reference import Message


def encode_chat(
    messages: Sequence[Message],
    render: Callable[[Sequence[Message]], str],
    special_ids: Mapping[str, int],
    encode_text: Callable[[str], list[int]],
) -> list[int]:
    """Return the ids of a conversation in which only the template's own special tokens are special.

    `render` is the chat template, `special_ids` maps the special tokens' texts to their ids, and
    `encode_text` knows no special token. Text of the messages stays text, whatever it spells.
    """
    raise NotImplementedError  # your turn
