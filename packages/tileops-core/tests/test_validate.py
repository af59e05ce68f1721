"""Each fault planted in a small family is found, with its code and at its place; what is right is left alone."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent, indent

import attrs
import pytest
from click.testing import CliRunner

from tileops.core.cli.check import command
from tileops.core.spec import Diagnostic
from tileops.core.spec.expr import FUNCTIONS
from tileops.core.validate import spec_files, validate

ROOT = Path(__file__).resolve().parents[3]
DATA = Path(__file__).parent / "data"
FILES = {
    "spec": """\
        ProductFwdOp:
          family: FAMILY
          summary: A product, and the sum of its rows when asked.
          status: implemented
          aliases: [ProdFwdOp]
          ref_api: math.prod
          reference: tileops.FAMILY.reference:product
          model: tileops.FAMILY.reference:model
          signature:
            forall: {M: Dim, K: Dim, N: Dim, T: "DType[float16 | bfloat16]"}
            params:
              with_sum: {type: bool, default: false}
              scale: {type: float, default: 1.0}
              kind: {type: "float32 | None", default: null}
            inputs:
              a: {dtype: T, shape: "[M, K]"}
              b: {dtype: T, shape: "[K, N]"}
              bias: {dtype: T, shape: "[N]", optional: true}
            outputs:
              d: {dtype: T, shape: "[M, N]"}
              total: {dtype: float32, shape: "[M]", when: with_sum}
          semantics:
            product: d is the product.
            empty: K = 0 gives zeros.
          workloads:
          - {label: plain, M: 2, K: 3, N: 4, dtype_cases: [{T: float16}, {T: bfloat16}]}
          - {label: all, M: 5, K: 6, N: 7, with_sum: true, some: [bias], dtype_cases: [{T: float16}]}
          baselines: {cuda: {required: [torch]}}
          roofline: {flops: "2 * M * K * N", unit: tensor_core, dtype: T}
        """,
    "reference": """\
        def product(a, b, bias, *, with_sum, scale, kind, T):
            d = a.float() @ b.float()
            d = (d if bias is None else d + bias) * scale
            return d.to(T), d.sum(-1) if with_sum else None

        def model(a, b, T, **rest):
            return product(a, b, T=T, **rest)

        def work(call):
            return 2 * call["M"] * call["K"] * call["N"]
        """,
    "init": """\
        import torch
        from attrs import define

        from tileops.core.op import Op


        @define(frozen=True)
        class ProductFwdOp(Op):
            \"\"\"A product.\"\"\"

            with_sum: bool = False
            scale: float = 1.0
            kind: torch.dtype | None = None

            def __call__(self, a, b, bias=None):
                return self.run(a, b, bias)


        ProdFwdOp = ProductFwdOp
        """,
    "test": """\
        import pytest


        @pytest.mark.semantics("ProductFwdOp", "product")
        @pytest.mark.semantics("ProductFwdOp", "empty")
        def test_it():
            pass
        """,
}
_fresh = itertools.count()


@attrs.frozen
class World:
    """A workspace with one family. Names are fresh each time, because modules and operators stay in the process."""

    root: Path
    files: dict[str, Path]
    rename: dict[str, str]

    def named(self, text: str) -> str:
        return re.sub("|".join(self.rename), lambda m: self.rename[m[0]], text)

    def write(self, which: str, text: str) -> None:
        self.files[which].write_text(self.named(dedent(text)))

    def plant(self, which: str, old: str, new: str) -> None:
        text, old = self.files[which].read_text(), self.named(old)
        assert text.count(old) >= 1, f"{old!r} is not in {which}"
        self.files[which].write_text(text.replace(old, self.named(new), 1))

    def check(self) -> list[Diagnostic]:
        return list(validate([self.files["spec"]]))

    def place(self, which: str, snippet: str) -> tuple[str, int, int]:
        """Where a snippet first stands in a file."""
        text = self.files[which].read_text()
        before = text[: text.index(self.named(snippet))]
        return f"{which}", before.count("\n") + 1, len(before) - before.rfind("\n")

    def where(self, found: Diagnostic) -> tuple[str, int, int]:
        which = next((n for n, p in self.files.items() if Path(found.place.path) == p), found.place.path)
        return which, found.place.line, found.place.column


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    n = next(_fresh)
    family, root = f"planted{n}", tmp_path.resolve() / "workspace"
    package = root / "packages/planted"
    files = {
        "spec": root / "specs/planted.yaml",
        "reference": package / "src/tileops" / family / "reference.py",
        "init": package / "src/tileops" / family / "__init__.py",
        "test": package / "tests/test_planted.py",
    }
    for path in files.values():
        path.parent.mkdir(parents=True, exist_ok=True)
    (root / "pyproject.toml").touch()
    made = World(root, files, {"FAMILY": family, "ProductFwdOp": f"Product{n}FwdOp", "ProdFwdOp": f"Prod{n}FwdOp"})
    for which, text in FILES.items():
        made.write(which, text)
    (files["init"].parent / "_spec.yaml").symlink_to(files["spec"])
    monkeypatch.syspath_prepend(str(package / "src"))
    return made


def test_a_sound_entry_gives_no_finding(world: World) -> None:
    assert world.check() == []


def test_the_symlink_in_a_package_is_its_spec(world: World) -> None:
    world.plant("test", '"empty"', '"emty"')
    by_link = validate([world.files["init"].parent / "_spec.yaml"])
    assert by_link == validate([world.files["spec"]])
    assert [d.code for d in by_link] == ["S701", "S702"] or [d.code for d in by_link] == ["S702", "S701"]


OP, FAMILY, PARAMS, INPUTS = (("spec", key) for key in ("ProductFwdOp", "family", "params:", "inputs:"))
A_FLAG, A_FLOAT, A_DTYPE = (("spec", f"{{type: {type_}") for type_ in ("bool", "float", '"float32 | None"'))
B, BIAS, PLAIN = ("spec", '{dtype: T, shape: "[K, N]"'), ("spec", '{dtype: T, shape: "[N]"'), ("spec", "{label: plain")
PRODUCT, MODEL = "tileops.FAMILY.reference:product", "tileops.FAMILY.reference:model"
CALL, MARK, CLASS = "(self, a, b, bias=None)", 'semantics("ProductFwdOp", "empty")', "ProdFwdOp = ProductFwdOp"
FLOPS, SUM = '"2 * M * K * N"', "d.sum(-1) if with_sum else None"

# code, what stands where, what is planted instead, the file and text at which the finding stands, words of it
FAULTS = [
    ("S304", "spec", "K: 3, N: 4,", "N: 4,", PLAIN, "lacks a value for 'K'"),
    ("S305", "spec", "{T: bfloat16}]}", "{T: float16}]}", PLAIN, "two calls have the id"),
    ("S306", "spec", ", some: [bias]", "", BIAS, "no row passes the optional input bias"),
    ("S306", "spec", "plain, M: 2", "plain, some: [bias], M: 2", BIAS, "no row omits the optional input bias"),
    ("S307", "spec", ", with_sum: true", "", A_FLAG, "no row has with_sum: true"),
    ("S307", "spec", "plain, M: 2", "plain, with_sum: true, M: 2", A_FLAG, "no row has with_sum: false"),
    ("S401", "spec", FLOPS, '"N // (K - 3)"', ("spec", "N // (K - 3)"), "divides by zero"),
    ("S402", "spec", FLOPS, "tileops.FAMILY:work", ("spec", "tileops.FAMILY:work"), "has no attribute 'work'"),
    ("S405", "spec", FLOPS, '"M * K * N"', ("spec", "M * K * N"), "are 24, those of the reference 48"),
    ("S501", "spec", PRODUCT, "tileops.FAMILY:product", ("spec", "tileops.FAMILY:product"), "no attribute 'product'"),
    ("S501", "spec", PRODUCT, "tileops.nothing:f", ("spec", "tileops.nothing:f"), "ModuleNotFoundError"),
    ("S501", "spec", PRODUCT, "tileops.FAMILY:__name__", ("spec", "tileops.FAMILY:__name__"), "is a str, no function"),
    ("S501", "spec", MODEL, "tileops.FAMILY:model", ("spec", "tileops.FAMILY:model"), "model 'tileops.FAMILY:model'"),
    ("S502", "reference", "*, with_sum", "*, sum", ("spec", PRODUCT), "takes no argument 'with_sum' by name"),
    ("S502", "reference", "kind, T):", "T):", ("spec", PRODUCT), "takes no argument 'kind' by name"),
    ("S502", "reference", "(a, b, bias, *", "(a, /, b, bias, *", ("spec", PRODUCT), "takes no argument 'a' by name"),
    ("S503", "reference", "kind, T):", "kind, T, eps):", ("spec", PRODUCT), "needs 'eps'"),
    ("S503", "reference", "model(a, b, T,", "model(a, b, t, T,", ("spec", MODEL), "needs 't', which is not in the sig"),
    ("S504", "reference", "a.float() @", "a.flot() @", ("spec", PRODUCT), "no attribute 'flot'"),
    ("S505", "reference", "d.to(T)", "d", ("spec", PRODUCT), "float32[2, 4] for d, the signature float16[2, 4]"),
    ("S505", "reference", "d.to(T)", "d.to(T).sum(0)", ("spec", PRODUCT), "float16[4] for d"),
    ("S505", "reference", "d.to(T)", "d.to(T).mT.contiguous().mT", ("spec", PRODUCT), "strides (1, 2) for d"),
    ("S505", "reference", "return d.to(T)", "return 3", ("spec", PRODUCT), "gives a int for d"),
    ("S505", "reference", " if with_sum else None", "", ("spec", PRODUCT), "for total, the signature nothing"),
    ("S505", "reference", SUM, "None", ("spec", PRODUCT), "nothing for total, the signature float32[5]"),
    ("S505", "reference", f", {SUM}", "", ("spec", PRODUCT), "gives 1 outputs, the signature 2 (d, total)"),
    ("S507", "spec", "math.prod", "math.prd", ("spec", "ref_api"), "names nothing in math"),
    ("S601", "init", "class ProductFwdOp(Op)", "class OtherFwdOp(Op)", FAMILY, "has no entry"),
    ("S601", "init", CLASS, f"{CLASS}\ndel ProductFwdOp", OP, "has no class of this name"),
    ("S601", "init", CLASS, "ProductFwdOp = ProdFwdOp = 3", OP, "is no subclass of tileops.core.Op"),
    ("S601", "init", "import torch", "import torch\n1 / 0", FAMILY, "can't be imported: ZeroDivisionError"),
    ("S601", "spec", "family: FAMILY", "family: nowhere", FAMILY, "no package tileops.nowhere is installed"),
    ("S602", "init", "    scale: float = 1.0\n", "", PARAMS, "with_sum, kind; the params are with_sum, scale, kind"),
    ("S602", "init", "    scale", "    scal", PARAMS, "fields with_sum, scal, kind"),
    ("S602", "init", "@define(frozen=True)", "", OP, "is not attrs.define(frozen=True)"),
    ("S603", "init", "float = 1.0", "float = 2.0", A_FLOAT, "the default 2.0, the param 1.0"),
    ("S603", "spec", "float, default: 1.0", "float, default: 2.0", A_FLOAT, "the default 1.0, the param 2.0"),
    ("S603", "init", "with_sum: bool = False", "with_sum: bool = 0", A_FLAG, "the default 0, the param False"),
    ("S603", "init", "dtype | None = None", "dtype = torch.float32", A_DTYPE, "'float32', the param None"),
    ("S604", "init", CALL, "(self, b, a, bias=None)", INPUTS, "called with (b, a, bias); the inputs are (a, b, bias)"),
    ("S604", "init", CALL, "(self, *inputs)", INPUTS, "variadic positional inputs"),
    ("S604", "init", CALL, "(self, a, b, bias)", BIAS, "may be absent, so the call must default it to None"),
    ("S604", "init", CALL, "(self, a, b=None, bias=None)", B, "is always given, so the call must not default it"),
    ("S605", "init", CLASS, "class ProdFwdOp: pass", ("spec", "ProdFwdOp"), "is not the class ProductFwdOp"),
    ("S606", "init", '"""A product."""', "", OP, "has no docstring"),
    ("S701", "test", '"empty"', '"product"', ("spec", "empty"), "no test names the semantics 'empty'"),
    ("S702", "test", '"empty")', '"empty", "epmty")', ("test", '"epmty"'), "'epmty'; did you mean 'empty'?"),
    ("S702", "test", MARK, f'{MARK}\n@pytest.mark.semantics("No", "x")', ("test", '"No"'), "no entry is called 'No'"),
    ("S703", "test", MARK, f'{MARK}\n@pytest.mark.semantics(*X, "x")', ("test", "pytest.mark.semantics(*"), "literals"),
    ("S703", "test", MARK, f'{MARK}\n@pytest.mark.semantics("X")', ("test", 'pytest.mark.semantics("X'), "its ids"),
    (
        "S806",
        "spec",
        "  baselines",
        "  source: {kernel: a.py}\n  baselines",
        ("spec", "kernel"),
        "'a.py', which is not th",
    ),
]


@pytest.mark.parametrize(("code", "which", "old", "new", "at", "said"), FAULTS)
def test_a_planted_fault_is_found_at_its_place(
    world: World, code: str, which: str, old: str, new: str, at: tuple[str, str], said: str
) -> None:
    world.plant(which, old, new)
    found = world.check()
    matching = [d for d in found if d.code == code and world.named(said) in str(d)]
    assert len(matching) == 1, "\n".join(map(str, found))
    assert world.where(matching[0]) == world.place(*at)
    assert matching[0].severity == ("warning" if code == "S507" else "error")


@pytest.mark.parametrize(
    ("which", "old", "new", "code"),
    [
        ("spec", ", with_sum: true", "", "S307"),
        ("spec", ", some: [bias]", "", "S306"),
        ("init", "ProdFwdOp = ProductFwdOp", "del ProductFwdOp", "S601"),
        ("spec", "family: FAMILY", "family: nowhere", "S601"),
        ("spec", "  baselines: {cuda: {required: [torch]}}\n", "", "S111"),
        ("spec", ", unit: tensor_core, dtype: T", "", "S111"),
    ],
)
def test_what_only_an_implemented_entry_must_have_is_a_warning_before(
    world: World, which: str, old: str, new: str, code: str
) -> None:
    world.plant("spec", "status: implemented", "status: spec-only")
    world.plant(which, old, new)
    assert [(d.code, d.severity) for d in world.check()] == [(code, "warning")]


def test_an_entry_without_rows_is_told(world: World) -> None:
    text = world.files["spec"].read_text()
    world.files["spec"].write_text(re.sub(r"workloads:\n(  - .*\n)+", "workloads: []\n", text))
    (found,) = world.check()
    assert (found.code, world.where(found)) == ("S308", world.place("spec", "workloads"))


def test_a_fault_of_many_rows_is_told_once(world: World) -> None:
    world.plant("reference", "d.to(T)", "d")
    (found,) = world.check()
    assert "/plain-float16 and 2 more)" in found.message


def test_a_broken_entry_gives_its_language_errors_and_no_echo(world: World) -> None:
    """Its family can't be imported any more; that is no second finding, and a test may go on naming it."""
    world.plant("spec", '"[M, N]"', '"[M, NN]"')
    assert [d.code for d in world.check()] == ["S104"]
    second = world.files["spec"].read_text().replace("ProductFwdOp", "X")
    world.files["spec"].write_text(world.named(dedent(FILES["spec"])) + re.sub(r"^Product\d+", "Second", second))
    assert {d.code for d in world.check()} == {"S104"}


def test_an_entry_whose_indices_can_not_be_solved_goes_no_further(world: World) -> None:
    world.plant("spec", "N: Dim,", "N: Dim, Z: Dim,")
    assert [d.code for d in world.check()] == ["S205"]


def test_a_test_file_that_can_not_be_read_is_a_finding(world: World) -> None:
    world.plant("test", "def test_it():", "def test_it(:")
    assert [(d.code, d.place.line) for d in world.check() if d.code != "S701"] == [("S704", 6)]


def test_outside_a_workspace_tests_are_named(world: World) -> None:
    (world.root / "pyproject.toml").unlink()
    (found,) = world.check()
    assert (found.code, found.severity) == ("S705", "warning")
    assert validate([world.files["spec"]], [world.files["test"].parent]) == ()
    elsewhere = world.root / "elsewhere"
    elsewhere.mkdir()
    assert [d.code for d in validate([world.files["spec"]], [elsewhere])] == ["S701", "S701"]


def test_a_name_that_is_taken(world: World) -> None:
    other = world.root / "specs/second.yaml"
    text = world.files["spec"].read_text()
    other.write_text(re.sub(r"^Product\d+", "Second", text))
    taken = [d for d in validate([world.root / "specs"]) if d.code == "S112"]
    assert [(d.place.path, d.place.line, d.place.column) for d in taken] == [(str(other), 5, 13)]


MASKED = """\
    ProductFwdOp:
      family: FAMILY
      summary: Scores under a mask.
      status: spec-only
      aliases: [ProdFwdOp]
      reference: tileops.FAMILY.reference:scores
      signature:
        forall: {Q: Dim, S: Dim, D: Dim, T: "DType[float16 | bfloat16]"}
        params:
          causal: {type: bool, default: false}
          left: {type: "int | None", default: null}
        inputs:
          q: {dtype: T, shape: "[Q, D]"}
          k: {dtype: T, shape: "[S, D]"}
        outputs:
          s: {dtype: T, shape: "[Q, S]"}
      workloads:
      - {label: causal, Q: 300, S: 400, D: 96, causal: true, dtype_cases: [{T: float16}]}
      - {label: window, Q: 300, S: 400, D: 64, left: 100, dtype_cases: [{T: float16}]}
      baselines: {cuda: {required: [torch]}}
      roofline:
        flops: "2 * D * visible(Q, S, causal, -1 if left is None else 0, -1)"
        bytes: "D * (Q + S)"
        unit: tensor_core
        dtype: T
    """
SCORES = """\
    def scores(q, k, *, causal, left, T):
        return q @ k.T
    """
CALLED = """\
    from attrs import define

    from tileops.core.op import Op


    @define(frozen=True)
    class ProductFwdOp(Op):
        \"\"\"Scores.\"\"\"

        causal: bool = False
        left: int | None = None

        def __call__(self, q, k):
            return self.run(q, k)


    ProdFwdOp = ProductFwdOp
    """


@pytest.fixture
def masked(world: World) -> World:
    for which, text in {"spec": MASKED, "reference": SCORES, "init": CALLED, "test": ""}.items():
        world.write(which, text)
    return world


def test_masked_flops_are_counted_without_the_mask_and_by_pairs(masked: World) -> None:
    assert masked.check() == []


def test_masked_flops_that_the_reference_contradicts(masked: World) -> None:
    masked.plant("spec", "2 * D", "D")
    (found,) = masked.check()
    assert (found.code, masked.where(found)) == ("S405", masked.place("spec", "D * visible"))
    assert "/causal-float16 and 1 more" in found.message


def test_masked_flops_that_pairs_contradict(masked: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A count of the causal mask that puts the diagonal at the top left."""
    true = FUNCTIONS["visible"]

    def top_left(s_q: int, s_kv: int, causal: bool, left: int, right: int) -> int:
        return true(s_q, s_q, True, left, right) if causal and s_q < s_kv else true(s_q, s_kv, causal, left, right)

    monkeypatch.setitem(FUNCTIONS, "visible", top_left)
    (found,) = masked.check()
    assert (found.code, masked.where(found)) == ("S404", masked.place("spec", "2 * D"))


def test_masks_that_always_hide_something_are_counted_where_they_can_not(masked: World) -> None:
    """One query sees every key of a causal mask."""
    masked.plant("spec", "visible(Q, S, causal, -1 if left is None else 0, -1)", "visible(Q, S, true, -1, -1)")
    assert masked.check() == []
    masked.plant("spec", "2 * D", "3 * D")
    assert [d.code for d in masked.check()] == ["S405"]
    masked.plant("spec", "visible(Q, S, true, -1, -1)", "visible(S, S, true, 0, -1)")
    masked.plant("spec", "  workloads:", '    where: ["S > 1"]\n  workloads:')
    (found,) = masked.check()
    assert (found.code, found.severity) == ("S406", "warning")


def test_the_default_bytes_of_a_masked_call_are_refused(masked: World) -> None:
    masked.plant("spec", '    bytes: "D * (Q + S)"\n', "")
    (found,) = masked.check()
    assert (found.code, found.severity) == ("S403", "error")
    assert masked.where(found) == masked.place("spec", 'flops: "2')
    assert "a mask may hide whole keys" in found.message


GATHER = """\
    ProductFwdOp:
      family: FAMILY
      summary: Rows of a table.
      status: spec-only
      aliases: [ProdFwdOp]
      reference: tileops.FAMILY.reference:rows
      signature:
        forall: {R: Dim, N: Dim, D: Dim, T: "DType[float16 | bfloat16]"}
        inputs:
          x: {dtype: T, shape: "[R, D]"}
          at: {dtype: int32, shape: "[N]", requires: index(R)}
        outputs:
          y: {dtype: T, shape: "[N, D]"}
      workloads:
      - {label: few, R: 300, N: 4, D: 8, dtype_cases: [{T: float16}]}
      baselines: {cuda: {required: [torch]}}
      roofline: {flops: "N * D", bytes: "4 * N * D", unit: cuda_core, dtype: float32}
    """
ROWS = """\
    import torch

    def rows(x, at, *, T):
        return torch.stack([x[i] for i in at.tolist()])
    """


@pytest.fixture
def gather(world: World) -> World:
    call = CALLED.replace("q, k", "x, at").replace("    causal: bool = False\n        left: int | None = None\n", "")
    for which, text in {"spec": GATHER, "reference": ROWS, "init": call, "test": ""}.items():
        world.write(which, text)
    return world


def test_a_reference_may_read_the_content_of_metadata(gather: World) -> None:
    assert gather.check() == []


def test_a_row_that_needs_more_content_is_skipped_aloud(gather: World) -> None:
    gather.plant("reference", "at.tolist()", "x[:, 0].tolist()")
    (found,) = gather.check()
    assert (found.code, found.severity, gather.where(found)) == (
        "S506", "warning", gather.place("spec", "tileops.FAMILY.reference:rows"),
    )  # fmt: skip


def test_a_slip_in_a_reference_of_metadata_is_no_lack_of_content(gather: World) -> None:
    gather.plant("reference", "at.tolist()", "att.tolist()")
    assert [(d.code, d.severity) for d in gather.check()] == [("S504", "error")]


def test_content_that_its_tensor_does_not_admit(gather: World) -> None:
    gather.plant("spec", "R: 300, N: 4, D: 8,", "R: 300, N: 4, D: 8, values: {at: index(301)},")
    assert gather.check() == []
    gather.plant("spec", "index(301)", "index(30000)")
    (found,) = gather.check()
    assert (found.code, gather.where(found)) == ("S309", gather.place("spec", "index(30000)"))
    assert "is not index(R)" in found.message


def test_the_default_bytes_of_a_gather_are_refused(gather: World) -> None:
    gather.plant("spec", 'bytes: "4 * N * D", ', "")
    (found,) = gather.check()
    assert (found.code, gather.where(found)) == ("S403", gather.place("spec", "{flops"))
    assert "the content of at says what is read" in found.message


BACKWARD = """\
    ProductBwdOp:
      family: FAMILY
      summary: The gradient of a product.
      status: spec-only
      reference: tileops.FAMILY.reference:backward
      signature:
        forall: {M: Dim, K: Dim, N: Dim, T: "DType[float16 | bfloat16]"}
        params: {scale: {type: float}}
        inputs:
          dd: {dtype: T, shape: "[M, N]"}
          a: {dtype: T, shape: "[M, K]"}
          b: {dtype: T, shape: "[K, N]"}
        outputs:
          da: {dtype: T, shape: "[M, K]"}
          db: {dtype: T, shape: "[K, N]"}
      workloads:
      - {label: plain, M: 2, K: 3, N: 4, scale: 1.0, dtype_cases: [{T: float16}]}
      baselines: {cuda: {required: [torch]}}
      roofline: {flops: "4 * M * K * N", unit: tensor_core, dtype: T}
    """
GRAD = """\
    grad:
      op: ProductBwdOp
      params: {scale: scale}
      inputs: {dd: grad(d), a: a, b: b}
      gives: {a: da, b: "db + grad(total)"}
    """


@pytest.fixture
def differentiable(world: World) -> World:
    text = world.files["spec"].read_text() + indent(dedent(GRAD), "  ") + dedent(BACKWARD)
    world.rename["ProductBwdOp"] = next(
        iter(set(world.rename.values()) & set(re.findall(r"Product\d+FwdOp", text)))
    ).replace("Fwd", "Bwd")
    world.write("spec", text)
    world.files["reference"].write_text(
        world.files["reference"].read_text()
        + "\ndef backward(dd, a, b, *, scale, T):\n    return dd @ b.T * scale, a.T @ dd * scale\n"
    )
    return world


def test_a_sound_gradient_gives_no_error(differentiable: World) -> None:
    assert [(d.code, d.severity) for d in differentiable.check()] == [("S601", "warning")]


@pytest.mark.parametrize(
    ("old", "new", "code", "at", "said"),
    [
        ("op: ProductBwdOp", "op: ProductBackOp", "S801", "op: ProductBackOp", "unknown op 'ProductBackOp'"),
        ("{scale: scale}", "{scale: scale, eps: 1}", "S802", "1}", "'eps' is no param"),
        ("a: a, b: b}", "a: a, b: b, c: b}", "S802", "b}", "'c' is no input"),
        ("{scale: scale}", "{}", "S803", "op: ProductBwdOp", "no param 'scale'"),
        ("dd: grad(d), ", "", "S803", "op: ProductBwdOp", "no input 'dd'"),
        ("a: da", "a: dda", "S804", "dda", "is no output of ProductBwdOp; did you mean 'da'?"),
        ("grad(total)", "grad(totl)", "S804", '"db + grad', "'totl' in 'gives' of grad is no output of ProductFwdOp"),
        ("a: a, b: b}", "a: a, b: saved(total)}", "S805", "saved(total)}", "saved(total) can't turn on"),
        (
            "{scale: scale}",
            "{scale: 1 if T == float16 else 2}",
            "S807",
            "op: ProductBwdOp",
            "uses 'T', which no tensor given to",
        ),
    ],
)
def test_a_fault_of_a_gradient(differentiable: World, old: str, new: str, code: str, at: str, said: str) -> None:
    differentiable.plant("spec", old, new)
    if code == "S805":
        differentiable.plant("spec", "when: with_sum", 'when: "with_sum and scale == 1.0"')
    (found,) = (d for d in differentiable.check() if d.code != "S601")
    assert (found.code, found.severity) == (code, "error")
    assert differentiable.named(said) in str(found)
    line = differentiable.where(found)[1]
    assert differentiable.named(at) in differentiable.files["spec"].read_text().splitlines()[line - 1]


def test_our_own_specs_have_no_error() -> None:
    found = validate([ROOT / "specs"])
    assert [str(d) for d in found if d.severity == "error"] == []


def test_the_abridged_newer_entry_is_told_what_it_still_needs() -> None:
    found = validate([DATA / "newer-abridged.yaml"])
    assert {d.severity for d in found} == {"warning"}
    said = "\n".join(d.message for d in found)
    for missing in ("summary", "status", "reference", "baselines", "unit", "dtype", "trans_a: true", "trans_b: true"):
        assert missing in said


def test_the_abridged_older_entry_is_checked_for_form(tmp_path: Path) -> None:
    spec = tmp_path / "older.yaml"
    spec.write_text(
        dedent("""\
        GemmFwdOp:
          ref_api: "torch.matmul"
          signature: {inputs: {a: {dtype: "float16 | bfloat16"}, b: {dtype: "same_as(a)"}}, ...}
          workloads: [{m: 1024, n: 1024, k: 1024, dtypes: [float16, bfloat16]}]
          roofline: {func: tileops.perf.formulas.gemm_fwd_roofline}
          source: {kernel: ..., op: ..., test: ..., bench: ..., kernel_map: ...}
        """)
    )
    assert {d.code for d in validate([spec])} == {"S102", "S303"}


def test_a_file_that_can_not_be_read(tmp_path: Path) -> None:
    assert [d.code for d in validate([tmp_path / "none.yaml"])] == ["S000"]
    (tmp_path / "bad.yaml").write_bytes(b"\xff\xfe\x00")
    (found,) = validate([tmp_path / "bad.yaml"])
    assert (found.code, found.message) == ("S000", "can't be read: it is not UTF-8")
    (tmp_path / "bad.yaml").write_text("a: [")
    assert [d.code for d in validate([tmp_path / "bad.yaml"])] == ["S001"]


def test_the_installed_families_are_the_default() -> None:
    assert {p.resolve() for p in spec_files()} >= {p.resolve() for p in (ROOT / "specs").glob("*.yaml")}


def test_the_command_reads_like_a_compiler(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.plant("init", "float = 1.0", "float = 2.0")
    monkeypatch.chdir(world.root)
    result = CliRunner().invoke(command, ["specs"])
    assert (result.exit_code, len(result.output.splitlines())) == (1, 2)
    world.plant("spec", "math.prod", "math.prd")
    result = CliRunner().invoke(command, ["specs/planted.yaml"])
    assert result.exit_code == 1
    first, second, summary = result.output.splitlines()
    assert first.startswith("specs/planted.yaml:6:3: warning[S507] ")
    assert second.startswith("specs/planted.yaml:13:14: error[S603] ")
    assert summary == "1 spec checked: 1 error, 1 warning"


def test_the_command_is_content_with_a_sound_spec(world: World) -> None:
    result = CliRunner().invoke(command, [str(world.files["spec"])])
    assert (result.exit_code, result.output) == (0, "1 spec checked: 0 errors, 0 warnings\n")


def test_strict_makes_warnings_errors(world: World) -> None:
    world.plant("spec", "math.prod", "math.prd")
    spec = str(world.files["spec"])
    assert CliRunner().invoke(command, [spec]).exit_code == 0
    strict = CliRunner().invoke(command, [spec, "--strict"])
    assert strict.exit_code == 1
    assert "error[S507]" in strict.output


def test_json_is_all_that_is_printed(world: World) -> None:
    world.plant("init", "import torch", "import torch\nprint('hello')")
    world.plant("spec", "math.prod", "math.prd")
    spec = str(world.files["spec"])
    result = CliRunner().invoke(command, [spec, "--json"])
    (found,) = json.loads(result.stdout)
    assert found["place"] == {"path": spec, "line": 6, "column": 3}
    assert (found["severity"], found["code"], found["hint"]) == ("warning", "S507", None)
    assert "names nothing" in found["message"]


def test_wrong_usage_exits_with_2(tmp_path: Path) -> None:
    for arguments in (["nowhere.yaml"], [str(tmp_path)], ["--tests", "nowhere"], ["--what"]):
        assert CliRunner().invoke(command, arguments).exit_code == 2


def test_without_torch_the_rest_is_checked(world: World) -> None:
    world.plant("spec", "K: 3, N: 4,", "N: 4,")
    world.plant("init", "float = 1.0", "float = 2.0")
    script = "import sys; sys.modules['torch'] = None; from tileops.core.cli.check import command; command()"
    done = subprocess.run(
        [sys.executable, "-c", script, str(world.files["spec"])], capture_output=True, text=True, cwd=world.root
    )
    assert done.stderr == ""
    assert done.returncode == 1
    codes = re.findall(r"\[(S\d+)\]", done.stdout)
    assert codes == ["S005", "S304"]


def test_the_command_is_loaded_without_torch() -> None:
    script = "import sys, tileops.core.cli.check; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_every_code_is_in_the_table() -> None:
    source = Path(validate.__code__.co_filename).parents[1]
    used = {code for file in source.rglob("*.py") for code in re.findall(r'"(S\d{3})"', file.read_text())}
    table = (ROOT / "docs/spec-codes.md").read_text()
    listed = re.findall(r"^\| (S\d{3}) \|", table, re.MULTILINE)
    assert listed == sorted(listed)
    assert used == set(listed)
    assert len(set(listed)) == len(listed)
    assert all(row.count("|") == 4 for row in re.sub(r"`[^`]*`", "", table).splitlines() if row.startswith("| S"))
