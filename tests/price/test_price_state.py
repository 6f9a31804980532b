"""What lives from the first step to the last, by the dtype contract."""

from planish.methods import AdamW
from planish.price.state import adamw_bytes, batch_bytes, parameter_bytes, update_bytes
from planish.shapes import TensorShape

STEP_COUNT_BYTES = 4


def tensors(itemsize):
    return [TensorShape(name="a.*", shape=(10, 7), count=3, itemsize=itemsize)]


def test_the_dtype_contract():
    """bf16 keeps 12 bytes of fp32 state a parameter, bf16-pure 4, fp32 8."""
    for itemsize, master, state in ((2, True, 12), (2, False, 4), (4, True, 8)):
        assert parameter_bytes(tensors(itemsize)) == 210 * itemsize
        assert adamw_bytes(tensors(itemsize), master=master) == 210 * state + 3 * STEP_COUNT_BYTES


def test_an_update_adds_one_fp32_gradient_where_parameters_are_narrower():
    assert update_bytes(tensors(2), AdamW(), master=True, microbatches=1) == 70 * 4 + 2
    assert update_bytes(tensors(2), AdamW(), master=False, microbatches=1) < 70 * 2
    assert update_bytes(tensors(4), AdamW(), master=True, microbatches=1) < 70 * 4


def test_a_batch_is_three_whole_numbers_a_token():
    assert batch_bytes(100) == 100 * 3 * 8
