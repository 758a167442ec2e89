//! Collectives in a program of your own: it starts itself as several workers, which add up numbers until they are told to
//! stop. `together 4 --wrong 2 --how size` lets rank 2 do something else after a while, to see how that ends.
//!
//! | option | |
//! |---|---|
//! | `--transport shm`, `tcp` | how the workers reach each other |
//! | `--count 1000` | numbers to add up |
//! | `--groups 2` | so many workers each add up numbers of their own, as those along an axis of a split model do |
//! | `--seconds 10` | for how long |
//! | `--wrong RANK`, `--after MS` | who goes wrong, and when |
//! | `--how WAY` | `kind`, `size`, `type`, `reduction`, `message`: another call than the others; `exit`, `panic`, `fail`: no call |
//! | `--out DIRECTORY` | where the logs go |

use kolo_cluster::{LocalOptions, Member, local};
use kolo_comm::tcp::{self, TcpOptions};
use kolo_comm::{Communicator, Fault, Reduction, shm};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

struct Plan {
    world: usize,
    transport: String,
    count: usize,
    /// Workers of a group; 0: all are one.
    groups: usize,
    time: Duration,
    wrong: Option<usize>,
    after: Duration,
    how: String,
    out: Option<String>,
}

impl Plan {
    fn read(words: &[String]) -> Result<Self, String> {
        let option = |name: &str| words.windows(2).find(|pair| pair[0] == name).map(|pair| pair[1].clone());
        let number = |name: &str, usual: u64| match option(name) {
            Some(text) => text.parse().map_err(|_| format!("{name} {text} is no number")),
            None => Ok(usual),
        };
        let world =
            words.first().and_then(|word| word.parse().ok()).ok_or("say how many workers, such as `together 4`")?;
        Ok(Self {
            world,
            transport: option("--transport").unwrap_or("shm".into()),
            count: number("--count", 1000)? as usize,
            groups: number("--groups", 0)? as usize,
            time: Duration::from_secs(number("--seconds", 10)?),
            wrong: number("--wrong", u64::MAX).map(|rank| usize::try_from(rank).ok().filter(|rank| *rank < world))?,
            after: Duration::from_millis(number("--after", 1000)?),
            how: option("--how").unwrap_or("size".into()),
            out: option("--out"),
        })
    }
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    run(&words, &[])
}

/// `first` are the words that lead this program here, if it has other uses.
pub fn run(words: &[String], first: &[&str]) -> ExitCode {
    let plan = match Plan::read(words) {
        Ok(plan) => plan,
        Err(text) => {
            eprintln!("error: {text}");
            return ExitCode::from(2);
        }
    };
    let ended = match Member::join(&|name| std::env::var(name).ok()) {
        Ok(Some(member)) => work(&plan, member),
        Ok(None) => supervise(&plan, first.iter().map(|word| word.to_string()).chain(words.iter().cloned())),
        Err(fault) => Err(fault),
    };
    match ended {
        Ok(code) => ExitCode::from(code),
        Err(fault) => {
            eprintln!("error: {fault}");
            ExitCode::FAILURE
        }
    }
}

/// Starts the workers, and ends when all are gone.
fn supervise(plan: &Plan, words: impl Iterator<Item = String>) -> Result<u8, Fault> {
    let program = std::env::current_exe().map_err(|error| Fault::system("finding this program", &error))?;
    let mut options = LocalOptions::new(plan.world, program, words.map(Into::into).collect());
    options.out = plan.out.as_ref().map(Into::into);
    let outcome = local::run(&options, &mut |_| {})?;
    if let Some(message) = outcome.message() {
        eprintln!("error: {message}");
    }
    Ok(u8::try_from(outcome.exit_code()).unwrap_or(1))
}

/// One of the workers. What goes wrong is told to the supervisor, who says it once.
fn work(plan: &Plan, mut member: Member) -> Result<u8, Fault> {
    let outcome = connect(plan, &mut member).and_then(|world| steps(plan, &world));
    if let Err(fault) = &outcome {
        if member.watch.check().is_ok() {
            member.fail_with(fault);
        }
        return Ok(1);
    }
    Ok(u8::from(member.finish().is_err()))
}

fn connect(plan: &Plan, member: &mut Member) -> Result<Communicator, Fault> {
    let (rank, size, watch) = (member.rank, member.world, Arc::clone(&member.watch));
    let transport = match plan.transport.as_str() {
        "tcp" => tcp::connect(rank, size, TcpOptions::local(member.key.clone(), member.job), watch, member)?,
        _ => shm::connect(rank, size, watch, member)?,
    };
    Ok(Communicator::new(transport, Arc::clone(&member.watch), true))
}

fn steps(plan: &Plan, world: &Communicator) -> Result<(), Fault> {
    let group = match plan.groups {
        0 => None,
        size => Some(world.split((world.rank() / size) as i64, world.rank() as i64)?),
    };
    let together = group.as_ref().unwrap_or(world);
    let (start, mut numbers) = (Instant::now(), vec![0.0f32; plan.count]);
    for step in 0.. {
        world.watch().set_step(step);
        if plan.wrong == Some(world.rank()) && start.elapsed() > plan.after {
            let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
            println!("rank {} goes wrong at {:.6}", world.rank(), now.as_secs_f64());
            go_wrong(plan, together)?;
        }
        numbers.fill(world.rank() as f32);
        together.all_reduce(&mut numbers, Reduction::Sum)?;
        // Neighbours greet each other.
        let (rank, mut greeting) = (together.rank(), [0i32; 4]);
        match (rank % 2, rank + 1 < together.size()) {
            (0, true) => together.send(&greeting, rank + 1)?,
            (1, _) => together.recv(&mut greeting, rank - 1)?,
            _ => {}
        }
        let mut over = [i32::from(start.elapsed() > plan.time)];
        world.all_reduce(&mut over, Reduction::Max)?;
        if over[0] > 0 {
            break;
        }
    }
    Ok(())
}

fn go_wrong(plan: &Plan, together: &Communicator) -> Result<(), Fault> {
    let mut numbers = vec![0.0f32; plan.count];
    match plan.how.as_str() {
        "kind" => together.broadcast(&mut numbers, 0),
        "size" => together.all_reduce(&mut vec![0.0f32; plan.count + 1], Reduction::Sum),
        "type" => together.all_reduce(&mut vec![0i32; plan.count], Reduction::Sum),
        "reduction" => together.all_reduce(&mut numbers, Reduction::Max),
        "message" => {
            together.all_reduce(&mut numbers, Reduction::Sum)?;
            match together.rank() % 2 {
                0 => together.send(&[0i32; 5], (together.rank() + 1) % together.size()),
                _ => together.recv(&mut [0i64; 4], together.rank() - 1),
            }
        }
        "exit" => std::process::exit(7),
        "panic" => panic!("this rank panics"),
        _ => Err(Fault::BadCall("this rank has had enough".into())),
    }
}
