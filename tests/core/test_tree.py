"""Tests of nested dicts of tensors: flattening, arithmetic, stacking."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from fedcog.core import tree

leaves = st.integers(0, 9).map(lambda value: torch.tensor([float(value)]))
names = st.text("abc.", min_size=1, max_size=4)
states = st.recursive(
    st.dictionaries(names, leaves, min_size=1, max_size=3),
    lambda inner: st.dictionaries(names, inner, min_size=1, max_size=3),
    max_leaves=8,
)


@given(states)
def test_unflatten_inverts_flatten(state: tree.State) -> None:
    assert tree.unflatten(tree.flatten(state)) == state


def test_arithmetic_equals_hand_calculation() -> None:
    a = {"w": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0])}
    b = {"b": torch.tensor([4.0]), "w": torch.tensor([0.0, -1.0])}
    assert tree.add(a, b)["w"].tolist() == [1.0, 1.0]
    assert tree.subtract(a, b)["b"].tolist() == [-1.0]
    assert tree.scale(2.0, a)["b"].tolist() == [6.0]
    assert float(tree.dot(a, b)) == -2 + 12
    assert float(tree.norm({"w": torch.tensor([3.0]), "b": torch.tensor([4.0])})) == 5.0


def test_take_inverts_stack_and_expand_copies() -> None:
    first = {"a": {"b": torch.tensor([1.0])}}
    second = {"a": {"b": torch.tensor([2.0])}}
    stacked = tree.stack([first, second])
    assert stacked["a"]["b"].tolist() == [[1.0], [2.0]]
    assert tree.take(stacked, 1) == second
    copies = tree.expand(first, 2)
    copies["a"]["b"][0] = 9
    assert first["a"]["b"].item() == 1 and copies["a"]["b"][1].item() == 1
