"""Drawing one token for every row of a batch at once.

Settings are per row, so a row's draw depends on its own logits, settings, seed and tokens alone. What a row
does not ask for is not computed for it: each part takes the rows that need it out of the batch and puts them
back. In order:

1. `shaping`: logit_bias, min_tokens, penalties, allowed tokens.
2. The mask of a constraint.
3. `filters`: temperature, top_k, top_p, min_p, xtc.
4. `draw`: the draw itself. Keys are counter-based: token n of a row is drawn with a number made of the row's
   seed and n, so the same tokens come alone, in any batch, and after preemption.

Log probabilities (`logprobs`) are those of the model's own logits, before all of this.
"""

from chairlift.engine.sampling.draw import Draw, Drawn, row_key, sample
from chairlift.engine.sampling.marks import Marks, marks_of
from chairlift.engine.sampling.mask import Mask
from chairlift.engine.sampling.shaping import Shaping

__all__ = ["Draw", "Drawn", "Marks", "Mask", "Shaping", "marks_of", "row_key", "sample"]
