"""How states are cut into pieces."""

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from shoal.training.checkpoints.folder import SizedTensor, TensorPart, plan_pieces

SIZES = st.lists(
    st.builds(
        SizedTensor,
        st.sampled_from(["model", "optimizer"]),
        st.text("ab.", max_size=3),
        st.integers(0, 700),
        st.sampled_from([1, 2, 4, 8]),
    ),
    max_size=12,
    unique_by=lambda each: each[:2],
)


@given(SIZES, st.integers(64, 2000))
def test_each_number_is_in_one_piece_and_no_piece_is_too_large(
    tensors: list[SizedTensor], piece_max: int
) -> None:
    pieces = plan_pieces(tensors, piece_max)

    units = {(each.section, each.name): each.unit for each in tensors}
    parts: dict[tuple[str, str], list[TensorPart]] = defaultdict(list)
    for piece in pieces:
        size = sum(
            (part.end - part.begin) * units[part.section, part.name]
            for part in piece.parts
        )
        assert size <= piece_max
        assert {part.section for part in piece.parts} == {piece.file.partition("-")[0]}
        for part in piece.parts:
            parts[part.section, part.name].append(part)
    for each in tensors:
        covered = 0
        for part in parts.pop((each.section, each.name)):
            assert part.begin == covered
            covered = part.end
        assert covered == each.length
    assert not parts
    assert len({piece.file for piece in pieces}) == len(pieces)
