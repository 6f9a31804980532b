"""Pieces laid into rows: nothing lost, nothing invented, bounds where pieces meet."""

import numpy as np
import torch

from planish.data.batch import IGNORED, Piece, assemble


def piece(*ids, target_bytes=None):
    tokens = np.array(ids, dtype=np.int32)
    target = np.append(tokens[1:], IGNORED).astype(np.int32)
    num_bytes = None if target_bytes is None else np.array(target_bytes, dtype=np.int32)
    return Piece(ids=tokens, target=target, target_bytes=num_bytes)


def test_rows_are_filled_and_their_bounds_told():
    batch = assemble([[piece(5, 6, 7), piece(8)], [piece(9, 10)]], width=4, pad_id=1)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8], [9, 10, 1, 1]]
    assert batch.target.tolist() == [[6, 7, IGNORED, IGNORED], [10, IGNORED, IGNORED, IGNORED]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0], [0, 1, 0, 1]]
    assert batch.cu_seq_lens == (0, 3, 4, 6, 8)
    assert batch.num_valid == 3
    assert {each.dtype for each in (batch.input_ids, batch.target, batch.position_ids)} == {torch.int64}


def test_a_cut_piece_still_predicts_the_token_after_the_cut():
    whole = piece(5, 6, 7, 8, target_bytes=[1, 2, 3, 0])
    first, rest = whole.cut(0, 2), whole.cut(2, 4)
    assert (first.ids.tolist(), first.target.tolist(), first.target_bytes.tolist()) == ([5, 6], [6, 7], [1, 2])
    assert (rest.ids.tolist(), rest.target.tolist(), rest.target_bytes.tolist()) == ([7, 8], [8, IGNORED], [3, 0])


def test_bytes_are_summed_only_where_all_are_known():
    known, unknown = piece(5, 6, target_bytes=[4, 0]), piece(7, 8)
    assert assemble([[known, known]], width=4, pad_id=0).num_bytes == 8
    assert assemble([[known, unknown]], width=4, pad_id=0).num_bytes is None


def test_a_batch_without_a_valid_target_is_legal():
    batch = assemble([[piece(3), piece(4)]], width=2, pad_id=0)
    assert batch.num_valid == 0
    assert (batch.target == IGNORED).all()
