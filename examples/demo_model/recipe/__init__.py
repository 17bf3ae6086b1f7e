"""The recipe of Penstock's built-in demonstration model: its data, tokenizer, training and evaluation.

Reading order: `draw` (seeded choices and the held-out split), `tasks` (one generator per task), `template` (messages
to text), `tokenizer`, `bank` (text to packed rows of tokens), `model`, `training`, `evaluation`, `export`,
and `eagle3`, a draft head for the model. Nothing before `model` imports torch, so data can be made anywhere.
"""
