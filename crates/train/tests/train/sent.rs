//! What layouts send, to the byte: the formulas of `docs/parallelism.md`. That ranks send what is planned, others test.

use kolo_exec::Options;
use std::collections::BTreeMap;

const WIDTH: u64 = 64;
const VOCABULARY: u64 = 251;
/// Grains of a step, of one sample each.
const GRAINS: u64 = 8;
/// Bytes of a number.
const F32: u64 = 4;

/// What a rank of a GPT sends in a step, along each axis.
fn sent(layers: u64, tokens: u64, workers: usize, rank: usize, parallel: &str) -> BTreeMap<String, u64> {
    let job = crate::job(&format!(
        "[model]\nkind = \"gpt\"\nlayers = {layers}\nwidth = {WIDTH}\nheads = 4\ncontext = {tokens}\nvocab = {VOCABULARY}\n\
         [data]\nsource = \"synthetic:tokens\"\nbatch = {GRAINS}\ngrains = {GRAINS}\n[train]\nsteps = 2\n\
         [parallel]\n{parallel}\n"
    ));
    let mesh = job.parallel.mesh(workers, rank).unwrap();
    let options = Options::for_grains(GRAINS as usize / mesh.size("data"), 1);
    let program = kolo_train::step::program_of(&job, &job.parallel, &mesh, options).unwrap();
    kolo_plan::sent_bytes(&program, &|axis| (mesh.coordinate(axis), mesh.size(axis)))
}

/// What all ranks send along an axis in a step for each block.
fn of_block(tokens: u64, workers: usize, axis: &str, parallel: &str) -> u64 {
    let of = |layers| (0..workers).map(|rank| sent(layers, tokens, workers, rank, parallel)[axis]).sum::<u64>();
    of(3) - of(2)
}

/// An activation of a grain.
fn activation(tokens: u64) -> u64 {
    tokens * WIDTH * F32
}

/// The weights of a block: four products, and 13 rows of biases and norms.
const BLOCK: u64 = (12 * WIDTH * WIDTH + 13 * WIDTH) * F32;
const TABLE: u64 = VOCABULARY * WIDTH * F32;

#[test]
fn data_ranks_send_what_the_formulas_say() {
    let (ranks, grains) = (4, GRAINS / 4);
    for (zero, times) in [(0, 2), (1, 2), (2, grains + 1), (3, 3 * grains)] {
        // (d − 1)/d of it per rank, so d − 1 times of all ranks together.
        assert_eq!(of_block(16, 4, "data", &format!("zero = {zero}")), times * (ranks - 1) * BLOCK, "zero = {zero}");
    }
    // The whole model, with the loss and the number of targets that count, each in a line of the cache.
    let weights = 3 * BLOCK + TABLE + (16 + 2) * WIDTH * F32;
    assert_eq!(sent(3, 16, 4, 1, "")["data"], 2 * (weights + 2 * 64) * 3 / 4);
}

#[test]
fn ranks_that_share_layers_send_what_the_formulas_say() {
    let tokens = 16;
    for ranks in [2, 4] {
        let workers = ranks as usize;
        let layers = format!("slices = 4\ntensor = {ranks}");
        assert_eq!(of_block(tokens, workers, "tensor", &layers), GRAINS * 8 * (ranks - 1) * activation(tokens));
        // Beside the blocks: the embedding and the head, and four numbers for every row and slice.
        let all = sent(3, tokens, workers, 0, &layers)["tensor"];
        let blocks = 3 * GRAINS * 8 * activation(tokens) * (ranks - 1) / ranks;
        let numbers = 4 * F32 * tokens * (4 / ranks) * (ranks - 1);
        assert_eq!(all - blocks, GRAINS * (4 * activation(tokens) * (ranks - 1) / ranks + numbers));
        // Rows of norms and biases that all have: two norms, and what is added behind the second product of a pair.
        let rows = 6 * WIDTH * F32;
        let cut = of_block(tokens, workers, "tensor", &format!("{layers}\nsequence = \"tensor\""));
        assert_eq!(cut, GRAINS * (ranks - 1) * (10 * activation(tokens) + 2 * rows));
    }
}

#[test]
fn ranks_that_share_tokens_send_what_the_formulas_say() {
    for ranks in [2, 4] {
        let workers = ranks as usize;
        let (ring, tokens) = (format!("slices = 8\ncontext = {ranks}\nsequence = \"context\""), 16);
        let keys = (ranks - 1) * 2 * activation(tokens) + (2 * ranks - 1) * 2 * activation(tokens);
        assert_eq!(of_block(tokens, workers, "context", &ring), GRAINS * (keys + 2 * (ranks - 1) * BLOCK));
        // As many tokens as features, so that gradients of weights are summed and activations stay where they are.
        let (heads, tokens) = (format!("slices = 4\ncontext = {ranks}\nsequence = \"heads\""), WIDTH);
        let exchanged = (4 + 5 + ranks) * (ranks - 1) * activation(tokens) / ranks;
        // The gradient of the bias of queries, keys and values is gathered by heads, not summed.
        let summed = 2 * (ranks - 1) * BLOCK - (ranks - 1) * 3 * WIDTH * F32;
        assert_eq!(of_block(tokens, workers, "sequence", &heads), GRAINS * (exchanged + summed));
    }
}

#[test]
fn stages_send_what_the_formulas_say() {
    let (layers, tokens) = (6, 16);
    let of = |rank, parallel: &str| sent(layers, tokens, 2, rank, &format!("pipeline = 2\n{parallel}"))["pipeline"];
    let passes = |count: u64| count * GRAINS * activation(tokens);
    // The first stage looks tokens up and measures one number, the last has the head and measures three.
    let (first, last) = (TABLE + F32, GRAINS * TABLE + 3 * F32);
    for schedule in ["gpipe", "1f1b", "zero-bubble"] {
        let parallel = format!("schedule = \"{schedule}\"");
        assert_eq!([of(0, &parallel), of(1, &parallel)], [passes(1) + first, passes(1) + last], "{schedule}");
    }
    // 2v passes, but for that of the first stage back and that of the last on.
    let chunks = "schedule = \"interleaved\"\nchunks = 2";
    assert_eq!([of(0, chunks), of(1, chunks)], [passes(3) + first, passes(3) + last]);
    // Half of the grains each way, and with them the table's gradient; weights of one stage and gradients of the other.
    let weights = layers * BLOCK + TABLE + (tokens + 2) * WIDTH * F32;
    for rank in [0, 1] {
        let both = passes(1) + weights + GRAINS / 2 * TABLE + 3 * F32;
        assert_eq!(of(rank, "schedule = \"bidirectional\""), both, "rank {rank}");
    }
}
