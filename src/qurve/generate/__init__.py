"""Text from a model: prompts in, continuations out.

    from qurve.generate import Sampling, generate, stream

    model, tokenizer = GPT.from_run(folder), run_tokenizer(folder)
    for made in generate(model, ["To the Congress"], tokenizer=tokenizer, max_new_tokens=64):
        print(made.text, made.why)

`loop` makes the tokens, `sampling` chooses them, `text` turns them into characters, `decoder` runs the model.
"""

from qurve.generate.loop import Generated, Piece, generate, stream
from qurve.generate.sampling import Sampling
from qurve.generate.text import run_tokenizer

__all__ = ["Generated", "Piece", "Sampling", "generate", "run_tokenizer", "stream"]
