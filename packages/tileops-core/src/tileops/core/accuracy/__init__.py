"""Whether a result is right: measured against float64, allowed what good arithmetic in the result's dtype needs.

The *oracle* is the entry's reference on float64 copies of the inputs. The *yardstick* is the entry's ``model``, else
the reference in float32, rounded once: it shows how large an error has to be. Each output, and each input that the call
mutates, is held to one rule:

``slices``     An element is off by at most ``factor`` (2) times the yardstick's largest error in its slice along the
               last axis, or by ``floor`` (1) ulp of the dtype at the slice's largest value; slices of fewer than 64
               elements count together with those beside them, to as many. In Frobenius norm the whole is off by at
               most ``factor`` times the yardstick's, or by ``floor`` - 1/2 ulp at each value (for 1, what rounding
               once can cost), or by ``floor`` ulp at the largest. Where the yardstick is a ``model`` or the result is
               float32, one element of 10 000, and one in all, may be off by 1.5 times its slice's bound: inner
               roundings fall on another grid in each kernel, and the largest of a slice's few is a sample. (Of 2
               million elements of attention, 6 to 13 are beyond when the model itself is only shifted to another grid,
               by 1.17 at most; of 1728 group norms in float32, each rounding the right one, 40 have one, by 1.33.)
``statistic``  The same with each element a slice of its own, and ``floor`` 4.
``codes``      A code is within 1 of the oracle's, and at most max(2, n / 1000) of n differ.
``exact``      Equal.

Float8 and int8 tensors are codes, other integers and bool exact, those declared as plain ``float32`` statistics, all
others slices. Where the oracle is NaN or Inf the result must not be finite, and must be the same where oracle and
yardstick are the same; where both are finite the result must be; where only the oracle is (float16 overflowed), nothing
is compared. What the reference leaves as it was in a mutated input must be so bit for bit.

The key ``accuracy`` of an entry maps the name of an output or mutated input to any of:

``rule``         one of the four, instead of the default by dtype
``contraction``  how many products, K, an element sums in float32. Adds ``K * 2**-24`` of the absolute product to an
                 element's bound, and ``2**-22`` of the norm of absolute product and sqrt(K) times the value to the
                 Frobenius bound: over a tensor roundings go either way, and allowing for their worst case would hide
                 partial sums in half precision. The absolute product is the reference on the absolute values of the
                 floating inputs or, where the reference itself subtracts, what the entry's function ``absolute`` gives:
                 the sum of the absolute terms of each result.
``factor``       instead of 2
``floor``        at least 1, instead of 1 or 4: for float32 results, whose arithmetic has no digits to spare
``reason``       why; must be there with ``factor`` or ``floor``

``contraction``, ``factor`` and ``floor`` are expressions: ``{y: {floor: "4 if T == float32 else 1", reason: ...}}``.
"""

from tileops.core.accuracy.measure import Finding
from tileops.core.accuracy.rules import Tolerance, tolerance, ulp
from tileops.core.accuracy.truth import Tensors, absolute, collect, full_precision, mutated, oracle, yardstick
from tileops.core.accuracy.verdict import Verdict, compare, judge, verify

__all__ = [
    "Finding",
    "Tensors",
    "Tolerance",
    "Verdict",
    "absolute",
    "collect",
    "compare",
    "full_precision",
    "judge",
    "mutated",
    "oracle",
    "tolerance",
    "ulp",
    "verify",
    "yardstick",
]
