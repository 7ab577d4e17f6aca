"""The ratings that are made, the split of users, the metrics, Mult-VAE, and the ways to feed it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse
from support.scripts import load, needs_gpu, one_thread

import h5chunk

__all__ = ["one_thread"]

ROWS, COLUMNS, RATINGS = 300, 120, 9000


make_ratings, train_vae, vae_compare = load("make_ratings"), load("train_vae"), load("vae_compare")
vae_data, vae_model = load("vae_data"), load("vae_model")
vae_feeds, vae_job = load("peers.vae_feeds"), load("peers.vae_job")
Rows = vae_data.Rows


@pytest.fixture(scope="module")
def ratings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ratings") / "ratings.npz"
    make_ratings.make_ratings(path, ROWS, COLUMNS, RATINGS, 0)
    return path


@pytest.fixture(scope="module")
def packed(ratings: Path) -> Path:
    path = ratings.with_suffix(".h5")
    h5chunk.convert(ratings, path, binarize=4, min_row_count=5)
    return path


@pytest.fixture(scope="module")
def split(packed: Path):
    with vae_data.split_users(packed) as split:
        yield split


def rows_of(dense: np.ndarray) -> Rows:
    matrix = sparse.csr_matrix(dense)
    return Rows(matrix.indptr.astype(np.int64), matrix.indices.astype(np.int32), dense.shape[1])


def random_rows(seed: int, shape: tuple[int, int] = (30, 20), density: float = 0.3) -> np.ndarray:
    return (np.random.default_rng(seed).random(shape) < density).astype(np.float32)


# --- ratings that are made -------------------------------------------------------------------------------------------


def test_ratings_are_as_many_as_asked_for(ratings):
    matrix = sparse.load_npz(ratings)
    assert matrix.shape == (ROWS, COLUMNS) and matrix.nnz == RATINGS
    counts = np.diff(matrix.indptr)
    assert counts.min() >= 20 and counts.max() <= COLUMNS // 2
    steps = np.diff(matrix.indices)
    steps = np.delete(steps, matrix.indptr[1:-1] - 1)
    assert steps.min() > 0  # ascending in each row, none twice
    assert set(np.unique(matrix.data)) <= set(np.arange(1, 11) / 2) and len(np.unique(matrix.data)) > 5


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 300), st.integers(40, 200), st.floats(0, 1), st.integers(0, 99))
def test_counts_of_users(num_rows, num_columns, fullness, seed):
    least, most = 20 * num_rows, num_columns // 2 * num_rows
    num_ratings = round(least + fullness * (most - least))
    counts = make_ratings.draw_counts(np.random.default_rng(seed), num_rows, num_columns, num_ratings)
    assert counts.sum() == num_ratings
    assert counts.min() >= 20 and counts.max() <= num_columns // 2


def test_shape_of_the_distributions():
    counts = make_ratings.draw_counts(np.random.default_rng(0), 138_493, 26_744, 20_000_000)
    assert 60 < np.median(counts) < 75 and counts.max() > 5000  # ML-20M: 68 and 9254
    popularity = np.sort(make_ratings.plant(200, 20_000, 20_000, 0).popularity)[::-1].astype(float)
    tail = np.polyfit(np.log(np.arange(2000, 20_000)), np.log(popularity[2000:]), 1)[0]
    assert -2.3 < tail < -1.9  # a power law, which levels off
    assert popularity[0] < 5 * popularity[100]  # of which it would be 25,000 times


def test_popular_columns_are_rated_most(ratings):
    columns = np.bincount(sparse.load_npz(ratings).indices, minlength=COLUMNS)
    planted = make_ratings.plant(ROWS, COLUMNS, RATINGS, 0).popularity
    assert columns[np.argsort(planted)[-12:]].mean() > 10 * columns[np.argsort(planted)[:60]].mean()


def test_columns_are_drawn_by_weight():
    """The chance of each pair is that of drawing one after another without putting back."""
    weights, count = np.array([5.0, 3.0, 2.0], np.float32), 20_000
    given = make_ratings.draw_columns(np.random.default_rng(0), np.tile(weights, (count, 1)), np.full(count, 2))
    pairs, shares = weights / weights.sum(), {}
    for a, b in ((0, 1), (0, 2), (1, 2)):
        shares[a, b] = pairs[a] * pairs[b] / (1 - pairs[a]) + pairs[b] * pairs[a] / (1 - pairs[b])
    for pair, share in shares.items():
        found = (given.reshape(-1, 2) == pair).all(1).mean()
        assert abs(found - share) < 4 * math.sqrt(share * (1 - share) / count)


def test_equal_times_give_no_more_columns():
    class Equal:
        def standard_exponential(self, shape: tuple[int, int], dtype: type) -> np.ndarray:
            return np.ones(shape, dtype)

    given = make_ratings.draw_columns(Equal(), np.ones((2, 5), np.float32), np.array([2, 4]))
    assert given.tolist() == [0, 1, 0, 1, 2, 3]


def test_blocks_are_drawn_apart(monkeypatch):
    monkeypatch.setattr(make_ratings, "BLOCK_ENTRIES", 120)
    planted = make_ratings.plant(4, 60, 80, 0)
    same = replace(planted, tastes=np.repeat(planted.tastes[:1], 4, 0))
    first, second = make_ratings.draw_blocks(same, 0)
    assert (first.first_row, second.first_row) == (0, 2)
    assert first.columns.tolist() != second.columns.tolist()


def test_tastes_show_in_columns_and_values(ratings):
    matrix = sparse.load_npz(ratings).tocoo()
    planted = make_ratings.plant(ROWS, COLUMNS, RATINGS, 0)
    likes = planted.tastes @ planted.genres.T
    of_ratings = likes[matrix.row, matrix.col]
    assert of_ratings.mean() > 1.5 * likes.mean()
    assert matrix.data[of_ratings > 0.5].mean() > matrix.data[of_ratings < 0.05].mean() + 0.3


@pytest.mark.parametrize("suffix", [".csv", ".npz"])
def test_equal_seeds_give_equal_bytes(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(make_ratings, "BLOCK_ENTRIES", 1000)
    first, second, third = (tmp_path / f"{name}{suffix}" for name in "abc")
    for path, seed in ((first, 1), (second, 1), (third, 2)):
        make_ratings.make_ratings(path, 100, 60, 2500, seed)
    assert first.read_bytes() == second.read_bytes() != third.read_bytes()
    assert len(list(tmp_path.iterdir())) == 3


def test_csv_is_the_same_matrix(tmp_path, monkeypatch):
    monkeypatch.setattr(make_ratings, "BLOCK_ENTRIES", 50 * COLUMNS)
    path, ratings = tmp_path / "ratings.csv", tmp_path / "ratings.npz"
    for each in (path, ratings):
        make_ratings.make_ratings(each, ROWS, COLUMNS, RATINGS, 0)
    assert path.read_text().splitlines()[0] == "userId,movieId,rating,timestamp"
    users, movies, values, times = np.loadtxt(path, delimiter=",", skiprows=1, unpack=True)
    matrix = sparse.load_npz(ratings)
    assert (values == matrix.data).all()
    ids, counts = np.unique(users, return_counts=True)
    assert (np.diff(users) >= 0).all() and (counts == np.diff(matrix.indptr)).all()
    movie_of = {}
    for movie, column in zip(movies.tolist(), matrix.indices.tolist(), strict=True):
        assert movie_of.setdefault(column, movie) == movie
    assert len(set(movie_of.values())) == len(movie_of)
    assert (np.diff(ids) > 1).any() and max(movie_of.values()) > COLUMNS  # not contiguous
    assert times.min() >= 1e9 and times.max() < 2e9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["r.txt"], "name it .csv or .npz"),
        (["missing/r.csv"], "there is no folder"),
        (["r.csv", "--rows", "0"], "--rows is 0: give at least 1"),
        (["r.csv", "--columns", "39"], "--columns is 39: give at least 40"),
        (["r.csv", "--rows", "10", "--columns", "100", "--ratings", "199"], "give 200 to 500"),
        (["r.csv", "--rows", "10", "--columns", "100", "--ratings", "501"], "give 200 to 500"),
    ],
)
def test_ratings_that_cannot_be(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        make_ratings.main(arguments)
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_what_is_printed_of_ratings(tmp_path, capsys):
    make_ratings.main([str(tmp_path / "r.npz"), "--rows", "50", "--columns", "60", "--ratings", "1200"])
    printed = capsys.readouterr().out
    assert "50 x 60, 1,200 ratings (40.00%)" in printed and "of a user: 20 to 30" in printed
    assert "the most popular 1 % have" in printed


def test_a_failure_leaves_no_file(tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(make_ratings.CsvWriter, "write", fail)
    with pytest.raises(OSError, match="no room"):
        make_ratings.make_ratings(tmp_path / "r.csv", 50, 60, 1200, 0)
    assert not list(tmp_path.iterdir())


# --- users to train on, and users held out ---------------------------------------------------------------------------


def test_rows_are_those_of_scipy():
    dense = random_rows(0)
    rows, order = rows_of(dense), np.random.default_rng(1).permutation(30)[:17]
    assert (rows.dense(0, 30).numpy() == dense).all()
    assert (rows.dense(11, 19).numpy() == dense[11:19]).all()
    assert (rows.take(order).dense(0, 17).numpy() == dense[order]).all()
    kept = random_rows(2).astype(bool)
    assert (rows.keep(kept[dense > 0]).dense(0, 30).numpy() == dense * kept).all()


def test_likes_do_not_depend_on_who_binarised(tmp_path, ratings, packed):
    path = tmp_path / "values.h5"
    h5chunk.convert(ratings, path, seed=5)
    ours, theirs = vae_data.read_likes(path), vae_data.read_likes(packed)
    expected = sparse.load_npz(ratings).toarray() >= 4
    expected = expected[expected.sum(1) >= 5]
    for rows in (ours, theirs):
        dense = rows.dense(0, len(rows)).numpy()
        assert sorted(map(bytes, dense.astype(np.uint8))) == sorted(map(bytes, expected.astype(np.uint8)))


def test_users_are_in_one_set_only(packed, split):
    likes = vae_data.read_likes(packed)
    held_out = len(likes) // 10
    assert len(split.train) == len(likes) - 2 * held_out
    assert len(split.validation.shown) == len(split.test.shown) == held_out
    with h5py_file(split.path) as file:
        columns = file["h5chunk/column_index"][:] if "column_index" in file["h5chunk"] else np.arange(COLUMNS)
    everybody = [split.train.dense(0, len(split.train))]
    for users in (split.validation, split.test):
        shown, hidden = (rows.dense(0, len(rows)) for rows in (users.shown, users.hidden))
        assert not (shown * hidden).any()
        likes_of = (shown + hidden).sum(1)
        assert (hidden.sum(1) == torch.floor(0.2 * likes_of)).all() and (hidden.sum(1) >= 1).all()
        everybody.append(shown + hidden)
    found = torch.cat(everybody).numpy().astype(np.uint8)
    expected = likes.dense(0, len(likes)).numpy().astype(np.uint8)[:, columns]
    assert sorted(map(bytes, found)) == sorted(map(bytes, expected))


def h5py_file(path: Path):
    import h5py

    return h5py.File(path, "r")


def test_columns_of_users_held_out_only_are_left_out(tmp_path):
    """Each of 40 users has a column that nobody else has."""
    dense = np.concatenate((np.eye(40), np.ones((40, 6))), 1)
    sparse.save_npz(tmp_path / "own.npz", sparse.csr_matrix(dense))
    h5chunk.convert(tmp_path / "own.npz", tmp_path / "own.h5")
    with vae_data.split_users(tmp_path / "own.h5") as split:
        assert split.train.num_columns == 32 + 6 and split.popularity.min() == 1
        assert (split.test.shown.dense(0, 4) + split.test.hidden.dense(0, 4) == 1).sum() == 4 * 6


def test_columns_that_nobody_trains_on_are_left_out():
    likes = rows_of(np.array([[1, 1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 0, 0, 1, 1]], np.float32))
    given = vae_data.hide(likes, np.array([0, 1, 2, 4, 5]), 0)
    assert given.shown.num_columns == 5 and len(given.shown) == len(given.hidden) == 1
    assert (given.shown.dense(0, 1) + given.hidden.dense(0, 1) == 1).all()


def test_the_split_is_the_same_each_time_and_leaves_nothing(packed):
    before = sorted(packed.parent.iterdir())
    given = []
    for _ in range(2):
        with vae_data.split_users(packed, held_out=7) as split:
            assert len(split.test.shown) == 7 and split.path.is_file()
            assert (split.popularity == split.train.dense(0, len(split.train)).sum(0).numpy()).all()
            given.append((split.test.hidden.indices.tolist(), split.train.indices.tolist()))
    assert given[0] == given[1]
    assert [path for path in packed.parent.iterdir() if path not in before] == []


def test_a_csv_is_converted_beside_it(tmp_path):
    path = tmp_path / "ratings.csv"
    make_ratings.make_ratings(path, 60, 60, 1500, 0)
    said: list[str] = []
    packed = vae_data.packed_file(path, said.append)
    assert packed == tmp_path / "ratings.h5" and "--binarize 4 --min-row-count 5" in said[0]
    stamp = packed.stat().st_mtime_ns
    assert vae_data.packed_file(path) == packed and packed.stat().st_mtime_ns == stamp
    os.utime(path, ns=(stamp + 1, stamp + 1))
    with pytest.raises(vae_data.DataError, match="is older than"):
        vae_data.packed_file(path)


def test_files_that_cannot_be_trained_from(tmp_path, packed):
    with pytest.raises(vae_data.DataError, match="no such file"):
        vae_data.packed_file(tmp_path / "none.h5")
    h5chunk.convert(packed.with_suffix(".npz"), tmp_path / "dense.h5", dense=True)
    with pytest.raises(vae_data.DataError, match="holds no rows of ratings"):
        vae_data.read_likes(tmp_path / "dense.h5")
    make_ratings.make_ratings(tmp_path / "few.npz", 8, 60, 200, 0)
    h5chunk.convert(tmp_path / "few.npz", tmp_path / "few.h5")
    with (
        pytest.raises(vae_data.DataError, match="users with 5 likes: it needs at least 10"),
        vae_data.split_users(tmp_path / "few.h5"),
    ):
        pass


# --- metrics and model -----------------------------------------------------------------------------------------------


def brute_force(scores: np.ndarray, hidden: set[int]) -> list[float]:
    """NDCG@100, Recall@20 and Recall@50 of a user, by their definitions."""
    ranked = sorted(range(len(scores)), key=lambda column: -scores[column])
    gain = sum(1 / math.log2(place + 2) for place, column in enumerate(ranked[:100]) if column in hidden)
    best = sum(1 / math.log2(place + 2) for place in range(min(100, len(hidden))))
    return [gain / best, *(len(hidden.intersection(ranked[:k])) / min(k, len(hidden)) for k in (20, 50))]


@pytest.mark.parametrize("num_columns", [60, 150, 400])
def test_metrics_are_as_defined(num_columns):
    rng = np.random.default_rng(num_columns)
    scores = rng.random((25, num_columns))
    hidden = rng.random(scores.shape) < rng.uniform(0.01, 0.6, (25, 1))
    hidden[:, 0] = True
    found = vae_model.ranking_metrics(torch.from_numpy(scores), torch.from_numpy(hidden).float())
    expected = [brute_force(*user) for user in zip(scores, (set(np.flatnonzero(row)) for row in hidden), strict=True)]
    assert torch.stack(list(found.values()), 1).numpy() == pytest.approx(np.array(expected), rel=1e-5)


def test_what_was_shown_is_never_recommended(monkeypatch, split):
    monkeypatch.setattr(vae_model, "EVALUATED_USERS", 7)
    users = split.test
    hidden = users.hidden.dense(0, len(users.hidden))
    asked = iter(hidden.split(7))
    perfect = vae_model.evaluate(lambda shown: 10 * shown + next(asked), users, "cpu")
    assert {name: value for name, value in perfect.items() if "error" not in name} == {
        "ndcg@100": pytest.approx(1),
        "recall@20": 1,
        "recall@50": 1,
    }


def test_means_and_errors_over_users(monkeypatch, split):
    monkeypatch.setattr(vae_model, "EVALUATED_USERS", 7)
    shown, hidden = (rows.dense(0, len(rows)) for rows in (split.test.shown, split.test.hidden))
    scores = torch.from_numpy(np.random.default_rng(0).random(tuple(shown.shape)))
    expected = vae_model.ranking_metrics(scores - 2 * shown, hidden)
    parts = iter(scores.split(7))
    found = vae_model.evaluate(lambda _: next(parts), split.test, "cpu")
    for name, values in expected.items():
        assert found[name] == pytest.approx(values.mean().item(), rel=1e-5)
        assert found[f"{name}_error"] == pytest.approx(np.std(values.numpy()) / len(values) ** 0.5, rel=1e-5)


def trainer_of(num_columns: int, **changes):
    options = {"lr": 3e-3, "beta": 0.2, "anneal_updates": 1000, "amp": "none", "compile": False, "seed": 0}
    return vae_model.Trainer(num_columns, device=torch.device("cpu"), **options | changes)


def test_loss_is_that_of_the_paper():
    network = vae_model.MultVAE(20, hidden=8, latent=3).eval()
    x, beta = torch.from_numpy(random_rows(0)), torch.tensor(0.3)
    logits, mean, log_variance = network(x)
    choices = torch.distributions.Categorical(logits=logits)
    likelihood = sum(x[:, i] * choices.log_prob(torch.tensor(i)) for i in range(20))
    normal = torch.distributions.Normal(mean, torch.exp(log_variance / 2))
    divergence = torch.distributions.kl_divergence(normal, torch.distributions.Normal(0, 1)).sum(1)
    expected = (-likelihood + 0.3 * divergence).mean()
    assert network.loss(x, beta).item() == pytest.approx(expected.item(), rel=1e-5)


def test_input_has_length_one_and_codes_are_drawn_in_training_only():
    network = vae_model.MultVAE(20, hidden=8, latent=3, dropout=0)
    x = torch.from_numpy(random_rows(0))
    network.eval()
    assert torch.allclose(network(x)[0], network(5 * x)[0], atol=1e-6)
    assert (network(x)[0] == network(x)[0]).all()
    network.train()
    assert (network(x)[0] != network(x)[0]).any()


def test_input_is_dropped_in_training_only():
    network, seen = vae_model.MultVAE(20, hidden=8, latent=3), []
    network.encoder.register_forward_pre_hook(lambda _, inputs: seen.append((inputs[0] != 0).float().mean()))
    x = torch.ones(500, 20)
    network(x)
    network.eval()(x)
    assert 0.47 < seen[0] < 0.53 and seen[1] == 1


def test_validation_does_not_disturb_training(split):
    trainer = trainer_of(split.train.num_columns)
    first, second = (trainer.evaluate(split.validation) for _ in range(2))
    assert first == second and trainer.network.training


def test_beta_grows_to_its_limit():
    trainer = trainer_of(20, anneal_updates=10, beta=0.3)
    seen = []
    for _ in range(6):
        trainer.step(torch.from_numpy(random_rows(0)))
        seen.append(float(trainer.beta))
    assert seen == pytest.approx([0, 0.1, 0.2, 0.3, 0.3, 0.3])


def test_bf16_trains_about_the_same():
    losses = []
    for amp in ("none", "bf16"):
        trainer = trainer_of(20, amp=amp)
        for _ in range(30):
            trainer.step(torch.from_numpy(random_rows(0)).to(vae_model.AMP[amp]))
        losses.append(trainer.take_total() / 30)
    assert losses[0] == pytest.approx(losses[1], rel=0.02) and trainer.take_total() == 0


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Users who like 12 of the 40 columns of their own of five groups, and 3 of 200: popularity tells nothing."""
    rng, dense = np.random.default_rng(0), np.zeros((600, 200), np.float32)
    for user, row in enumerate(dense):
        row[40 * (user % 5) + rng.permutation(40)[:12]] = 1
        row[rng.integers(0, 200, 3)] = 1
    path = tmp_path_factory.mktemp("groups") / "groups.npz"
    sparse.save_npz(path, sparse.csr_matrix(dense))
    h5chunk.convert(path, path.with_suffix(".h5"))
    return path.with_suffix(".h5")


@pytest.mark.parametrize("feed", ["toarray", "h5chunk"])
def test_learns_more_than_popularity(groups, feed):
    said: list[str] = []
    chosen = train_vae.Settings(groups, feed=feed, device="cpu", epochs=8, batch_size=60, lr=3e-3)
    found = train_vae.run(chosen, False, said.append)
    assert found["test"]["ndcg@100"] > found["most_popular"]["test"]["ndcg@100"] + 0.1
    assert found["test"]["recall@50"] > 1.5 * found["most_popular"]["test"]["recall@50"]
    assert found["epochs"][-1]["loss"] < found["epochs"][0]["loss"]
    assert "Mult-VAE, test:" in said[-1] and len(found["epochs"]) == 8


def test_the_best_weights_are_tested(split, monkeypatch):
    scores = iter([0.1, 0.9, 0.5])
    trainer = trainer_of(split.train.num_columns)
    seen = []

    def evaluate(_users: object) -> dict[str, float]:
        seen.append(trainer.network.encoder.weight.detach().clone())
        return dict.fromkeys(train_vae.METRICS, next(scores))

    monkeypatch.setattr(trainer, "evaluate", evaluate)
    chosen = train_vae.Settings(split.path, device="cpu", epochs=3, batch_size=60)
    feed = vae_feeds.ToArray(train_vae.make_job(chosen, split))
    train_vae.train_epochs(chosen, split, trainer, feed, lambda _: None)
    assert (trainer.network.encoder.weight == seen[1]).all() and (seen[1] != seen[2]).any()


# --- feeds -----------------------------------------------------------------------------------------------------------

ON_CPU = [name for name in vae_feeds.FEEDS if name not in ("cached", "dense-device")]
ON_GPU = [pytest.param(name, marks=needs_gpu) for name in vae_feeds.FEEDS if name != "cached"]


@pytest.fixture
def job(split):
    return vae_job.Job(split.path, split.train, 17, torch.device("cpu"), drop_last=False)


def epoch_of(feed, number: int = 0) -> list[torch.Tensor]:
    return [x.clone() for x in feed.epoch(number)]


def in_bytes(batches: list[torch.Tensor]) -> list[bytes]:
    return [bytes(row) for row in torch.cat(batches).to(torch.uint8).numpy()]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("name", ON_CPU)
def test_every_feed_gives_every_row_once(job, name, drop_last):
    job = replace(job, drop_last=drop_last)
    feed = vae_feeds.FEEDS[name](job)
    first, second = epoch_of(feed, 0), epoch_of(feed, 1)
    feed.close()
    rest = [] if drop_last or not len(job.rows) % 17 else [len(job.rows) % 17]
    assert [len(x) for x in first] == [17] * (len(job.rows) // 17) + rest
    assert {x.dtype for x in first} == {torch.float32}
    expected = in_bytes([job.rows.dense(0, len(job.rows))])
    for epoch in (first, second):
        if drop_last:
            counted = {row: expected.count(row) for row in set(expected)}
            assert all(in_bytes(epoch).count(row) <= counted.get(row, 0) for row in set(in_bytes(epoch)))
        else:
            assert sorted(in_bytes(epoch)) == sorted(expected)
    assert in_bytes(first) != in_bytes(second) and in_bytes(first) != expected


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:DeprecationWarning")
@pytest.mark.parametrize("name", ON_GPU)
def test_every_feed_on_a_gpu(job, name):
    """Read only at the end: memory that is used again too early would show."""
    feed = vae_feeds.FEEDS[name](replace(job, device=torch.device("cuda"), num_threads=2))
    expected = sorted(in_bytes([job.rows.dense(0, len(job.rows))]))
    for number in range(3):
        batches = list(feed.epoch(number))
        assert {x.device.type for x in batches} == {"cuda"}
        assert sorted(in_bytes([x.cpu() for x in batches])) == expected
    feed.close()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("name", ["getitem", "workers"])
def test_worker_processes_change_nothing(job, name):
    alone, helped = (vae_feeds.FEEDS[name](replace(job, num_workers=count)) for count in (0, 1))
    assert in_bytes(epoch_of(alone)) == in_bytes(epoch_of(helped))
    helped.close()


def test_baselines_have_the_same_order(job):
    names = [name for name in ON_CPU if name not in vae_feeds.OURS]
    given = {name: in_bytes(epoch_of(vae_feeds.FEEDS[name](job), 3)) for name in names}
    assert all(rows == given["toarray"] for rows in given.values())


def test_batches_have_the_dtype_of_the_job(job):
    for name in (*ON_CPU, "cached"):
        feed = vae_feeds.FEEDS[name](replace(job, dtype=torch.bfloat16))
        assert {x.dtype for x in epoch_of(feed)} == {torch.bfloat16}
        feed.close()


def test_the_cached_batch_is_a_real_one(job):
    batches = epoch_of(vae_feeds.Cached(job), 5)
    assert [len(x) for x in batches] == [len(x) for x in epoch_of(vae_feeds.ToArray(job))]
    assert all((x == batches[0][: len(x)]).all() for x in batches)
    assert set(in_bytes(batches[:1])) <= set(in_bytes([job.rows.dense(0, len(job.rows))]))


def test_a_dense_matrix_takes_what_there_is(job, monkeypatch):
    num_bytes = len(job.rows) * job.rows.num_columns
    for free, dtype in ((8 * num_bytes, torch.float32), (8 * num_bytes - 2, torch.uint8)):
        monkeypatch.setattr(vae_feeds, "available_bytes", lambda free=free: free)
        assert vae_feeds.Dense(job, on_device=False).matrix.dtype == dtype
    monkeypatch.setattr(vae_feeds, "available_bytes", lambda: 2 * num_bytes - 1)
    with pytest.raises(vae_job.FeedError, match="more than half of the"):
        vae_feeds.Dense(job, on_device=False)


# --- comparing -------------------------------------------------------------------------------------------------------


def test_compare_takes_turns(job, monkeypatch):
    done: list[tuple[str, int]] = []

    class Fake:
        def __init__(self, name: str) -> None:
            self.name = name

        def epoch(self, number: int) -> Iterator[torch.Tensor]:
            done.append((self.name, number))
            yield torch.from_numpy(random_rows(0))

        def close(self) -> None:
            done.append((self.name, -1))

    names = ("cached", "toarray", "h5chunk")
    monkeypatch.setattr(vae_compare, "FEEDS", {name: lambda job, name=name: Fake(name) for name in names})
    said: list[str] = []
    rows, left_out = vae_compare.compare(names[1:], job, trainer_of(20), 2, said.append)
    there = [(name, number) for name in names for number in (1, 2)]
    back = [(name, number) for name in reversed(names) for number in (3, 4)]
    assert done == [(name, 0) for name in names] + there + back + [(name, -1) for name in names]
    assert not left_out and [len(row["epochs_s"]) for row in rows] == [2, 2, 2]
    for row in rows:
        assert row["times"]["cached"] == pytest.approx(row["epoch_s"] / rows[0]["epoch_s"])
    assert "/ cached" in said[0] and "/ h5chunk" in said[0] and len(said) == 4


def test_compare_from_the_command_line(packed, tmp_path, capsys):
    saved = tmp_path / "feeds.json"
    feeds = ["--feeds", "toarray", "dense-device", "h5chunk"]
    options = ["--rounds", "1", "--batch-size", "60", "--device", "cpu", "--json", str(saved)]
    train_vae.main([str(packed), "--compare", *feeds, *options])
    printed, found = capsys.readouterr().out, json.loads(saved.read_text())
    assert "dense-device is skipped (dense-device is for a GPU" in printed
    assert [row["feed"] for row in found["feeds"]] == ["cached", "toarray", "h5chunk"]
    assert found["left_out"].keys() == {"dense-device"}
    assert {"torch", "h5py", "scipy"} <= found["versions"].keys() and found["settings"]["seed"] == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("amp", ["none", "bf16"])
def test_trains_on_a_gpu(groups, amp):
    chosen = train_vae.Settings(groups, device="cuda", epochs=8, batch_size=60, lr=3e-3, amp=amp)
    found = train_vae.run(chosen, False, lambda _: None)
    assert found["test"]["ndcg@100"] > found["most_popular"]["test"]["ndcg@100"] + 0.1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch-size", "100000"], "--batch-size is 100000, but there are"),
        (["--epochs", "0"], "--epochs is 0: give at least 1"),
        (["--num-workers", "-1"], "--num-workers is -1: give at least 0"),
        (["--feed", "dense-device"], "is for a GPU"),
        (["--json", "missing/x.json"], "there is no folder"),
    ],
)
def test_what_is_refused(packed, capsys, options, message):
    with pytest.raises(SystemExit) as exit:
        train_vae.main([str(packed), "--device", "cpu", "--epochs", "1", "--batch-size", "60", *options])
    assert exit.value.code == 2 and message in capsys.readouterr().err


def test_every_setting_has_a_switch():
    switches = vars(train_vae.make_parser().parse_args(["ratings.h5"]))
    assert set(switches) - {"json", "compare"} == set(train_vae.Settings.__dataclass_fields__)
