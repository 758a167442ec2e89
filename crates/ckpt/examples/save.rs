//! Times saves of a state like that of a model of so many parameters with Adam, for `bench/checkpoint.py`.
//!
//! `save DIR PARAMETERS RANKS` reads lines from standard input and answers each: `save` with the seconds of a save, `read` with
//! those of reading all of it back, `verify` with those of comparing it with its digests.

use kolo_ckpt::{Header, Keep, Piece, RealDisk, Role, Summary, commit, newest_valid, prune, staging_dir, write_shard};
use kolo_graph::DType;
use std::error::Error;
use std::io::{BufRead, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Tensors of each role, as GPT-2 with 12 layers has them.
const TENSORS: usize = 148;

/// A parameter or a moment.
type Tensor = (String, Role, Vec<u8>);

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().collect();
    let [_, dir, parameters, ranks] = words.as_slice() else { return Err("save DIR PARAMETERS RANKS".into()) };
    let (parameters, ranks): (usize, usize) = (parameters.parse()?, ranks.parse()?);
    let state = state(parameters);
    let root = Path::new(dir);
    let disk = RealDisk::shared();
    let mut step = 0;
    for line in std::io::stdin().lock().lines() {
        let started = Instant::now();
        let seconds = match line?.as_str() {
            "save" => {
                step += 1;
                let path = save(root, step, &state, ranks)?;
                let seconds = started.elapsed().as_secs_f64();
                prune(&disk, root, Keep { newest: 1, committed: Some(&path), ..Keep::default() })?;
                seconds
            }
            "read" => {
                let mut buffer = Vec::new();
                let newest = kolo_ckpt::list(&disk, root)?.pop().ok_or("nothing was saved")?.checkpoint?;
                for tensor in newest.tensors() {
                    buffer.resize(tensor.bytes(), 0);
                    newest.read(&tensor.name, 0..tensor.elements(), &mut buffer)?;
                }
                started.elapsed().as_secs_f64()
            }
            _ => {
                newest_valid(&disk, root)?.checkpoint.ok_or("nothing is sound")?;
                started.elapsed().as_secs_f64()
            }
        };
        println!("{seconds}");
        std::io::stdout().flush()?;
    }
    Ok(())
}

fn state(parameters: usize) -> Vec<Tensor> {
    let mut state = Vec::new();
    for (role, prefix, suffix) in
        [(Role::Parameter, "", ""), (Role::Moment, "optim.", ".m"), (Role::Moment, "optim.", ".v")]
    {
        for at in 0..TENSORS {
            let elements = parameters * (at + 1) / TENSORS - parameters * at / TENSORS;
            let bytes = (0..elements).flat_map(|element| ((element * 7 + at) as f32).to_le_bytes()).collect();
            state.push((format!("{prefix}h.{at}.weight{suffix}"), role, bytes));
        }
    }
    state
}

/// Saves as so many ranks do, each on a thread of its own.
fn save(root: &Path, step: u64, state: &[Tensor], ranks: usize) -> Result<PathBuf, Box<dyn Error>> {
    let staging = staging_dir(root, step, 0);
    let shards: Vec<Result<Summary, kolo_ckpt::CkptError>> = std::thread::scope(|scope| {
        let write = |rank: usize| {
            let staging = &staging;
            scope.spawn(move || {
                let shapes: Vec<[usize; 1]> = state.iter().map(|(.., bytes)| [bytes.len() / 4]).collect();
                let mut pieces = state.iter().zip(&shapes).map(|((name, role, bytes), shape)| {
                    let (start, end) = (shape[0] * rank / ranks, shape[0] * (rank + 1) / ranks);
                    let bytes = &bytes[start * 4..end * 4];
                    Piece {
                        tensor: name,
                        whole: shape,
                        dtype: DType::F32,
                        role: *role,
                        region: kolo_graph::Region::from(start),
                        bytes,
                    }
                });
                write_shard(&RealDisk, staging, rank, ranks, &mut pieces, &|_| ())
            })
        };
        let threads: Vec<_> = (0..ranks).map(write).collect();
        threads.into_iter().filter_map(|thread| thread.join().ok()).collect()
    });
    let shards: Vec<Summary> = shards.into_iter().collect::<Result<_, _>>()?;
    Ok(commit(&RealDisk, root, &staging, &Header { step, ..Header::default() }, &shards)?)
}
