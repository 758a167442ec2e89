//! The memory check: whether a job fits into the memory of this machine, before any of it is taken. The kernel would kill a job
//! that does not fit, at any step and without a message.

use crate::error::Error;
use crate::machine::format_bytes;
use kolo_base::group_limit;
use kolo_comm::{Communicator, host};
use kolo_plan::MemoryPlan;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::PathBuf;

/// The processes that share a machine's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostUsage {
    processes: usize,
    /// Bytes that all take together.
    bytes: u64,
    /// Of these, what those take whom the same control group limits.
    group_bytes: u64,
    /// All need as much.
    alike: bool,
    /// Bytes of the one that needs most, on whatever machine.
    largest: u64,
}

impl HostUsage {
    /// Bytes of the process that needs most, on whatever machine.
    pub fn largest(&self) -> u64 {
        self.largest
    }

    /// Bytes that all take together.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The same if each process here takes so much more.
    pub(crate) fn with_each(self, more: u64) -> Self {
        let all = more.saturating_mul(self.processes as u64);
        Self {
            bytes: self.bytes.saturating_add(all),
            group_bytes: self.group_bytes.saturating_add(all),
            largest: self.largest.saturating_add(more),
            ..self
        }
    }

    /// One process.
    pub fn alone(plan: &MemoryPlan) -> Self {
        Self::alike(plan, 1, false)
    }

    /// Processes with one plan; they may have one copy of the weights.
    pub fn alike(plan: &MemoryPlan, processes: usize, share_weights: bool) -> Self {
        let one = Needs::of(plan, share_weights, [0, 0]);
        Self::of(&one, &vec![one; processes])
    }

    /// All ranks of a communicator that run on this machine. All of them call it.
    pub(crate) fn among(plan: &MemoryPlan, share_weights: bool, world: &Communicator) -> Result<Self, Error> {
        let kernel = host::kernel().unwrap_or_else(|| format!("that of rank {}", world.rank()));
        // In a container, paths of groups start from its own.
        let root = std::fs::read_link("/proc/self/ns/cgroup").unwrap_or_default();
        let group = group_limit().map_or(PathBuf::new(), |(_, file)| file);
        let group = number_of(&format!("{kernel} {} {}", root.display(), group.display()));
        let groups = [number_of(&kernel), group];
        let mine = Needs::of(plan, share_weights, groups);
        let mut told = vec![0; 4 * world.size()];
        world.all_gather(&mine.encode(), &mut told)?;
        Ok(Self::of(&mine, &told.as_chunks().0.iter().map(Needs::decode).collect::<Vec<_>>()))
    }

    /// Those of `all` that are where `mine` is.
    fn of(mine: &Needs, all: &[Needs]) -> Self {
        let [host, group] = mine.groups;
        let here = || all.iter().filter(|needs| needs.groups[0] == host);
        Self {
            processes: here().count(),
            bytes: Needs::total(here()),
            group_bytes: Needs::total(here().filter(|needs| needs.groups[1] == group)),
            alike: here().all(|needs| needs == mine),
            largest: all.iter().map(|needs| needs.own.saturating_add(needs.shared)).max().unwrap_or(0),
        }
    }
}

/// The ranks of a communicator that run on this machine. All of them call it.
pub(crate) fn processes_here(world: &Communicator) -> Result<usize, Error> {
    let kernel = host::kernel().unwrap_or_else(|| format!("that of rank {}", world.rank()));
    let mine = number_of(&kernel);
    let mut told = vec![0; world.size()];
    world.all_gather(&[mine], &mut told)?;
    Ok(told.into_iter().filter(|other| *other == mine).count())
}

/// What a process takes for itself and what once with others, and the numbers of its machine and its control group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Needs {
    own: u64,
    shared: u64,
    groups: [i64; 2],
}

impl Needs {
    fn of(plan: &MemoryPlan, share_weights: bool, groups: [i64; 2]) -> Self {
        let shared = if share_weights { plan.weights } else { 0 };
        Self { own: (plan.total() - shared) as u64, shared: shared as u64, groups }
    }

    fn encode(&self) -> [i64; 4] {
        [self.own as i64, self.shared as i64, self.groups[0], self.groups[1]]
    }

    fn decode(words: &[i64; 4]) -> Self {
        let [own, shared, host, group] = *words;
        Self { own: own as u64, shared: shared as u64, groups: [host, group] }
    }

    fn total<'a>(all: impl Iterator<Item = &'a Self> + Clone) -> u64 {
        let shared = all.clone().map(|needs| needs.shared).max().unwrap_or(0);
        all.fold(shared, |sum, needs| sum.saturating_add(needs.own))
    }
}

/// The same number for the same text, in all processes of a job.
fn number_of(text: &str) -> i64 {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    hasher.finish() as i64
}

/// Refuses a plan that needs more memory than there is.
pub(crate) fn check(plan: &MemoryPlan, usage: HostUsage) -> Result<(), Error> {
    match shortage(plan, usage).filter(|_| std::env::var_os(UNCHECKED).is_none()) {
        Some(shortage) => Err(Error::Memory(shortage.explain(plan, usage))),
        None => Ok(()),
    }
}

/// If this variable is set, nothing is refused: a machine may have memory that it does not tell of.
const UNCHECKED: &str = "KOLO_MEMORY_UNCHECKED";

/// What is missing of the memory that processes with this plan take on this machine.
pub fn shortage(plan: &MemoryPlan, usage: HostUsage) -> Option<Shortage> {
    Limits::read().shortage(plan, usage)
}

/// Bytes that all processes of this machine may take together, as far as it tells.
pub fn host_bytes() -> Option<u64> {
    let Limits { machine, group, .. } = Limits::read();
    machine.into_iter().chain(group).min()
}

/// More memory is needed than there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shortage {
    pub needed: u64,
    pub limit: u64,
    /// Whose limit it is.
    pub whose: &'static str,
}

impl std::fmt::Display for Shortage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.whose, format_bytes(self.limit))
    }
}

impl Shortage {
    /// What needs it, and what to do about the largest part.
    fn explain(&self, one: &MemoryPlan, usage: HostUsage) -> String {
        let mut hint = largest_hint(one);
        let each = match (usage.processes, usage.alike) {
            (1, _) => String::new(),
            (count, true) => format!(" for each of {count} workers here"),
            (count, false) => format!(" for this one of {count} processes here"),
        };
        if one.total() as u64 <= self.limit {
            hint = "use fewer workers on a host; `kolo plan` shows what one needs";
        }
        format!(
            "the job needs {} of memory, but {self}\n  {}{each}\n  hint: {hint} (`{UNCHECKED}=1` starts it anyway)",
            format_bytes(self.needed),
            by_kind(one, false)
        )
    }
}

/// The parts of a plan, and what makes each of them smaller.
fn kinds(one: &MemoryPlan) -> [(&'static str, usize, &'static str); 10] {
    [
        ("weights", one.weights, "share them among workers with `parallel.zero = 3`, or use a smaller model"),
        (
            "gradients",
            one.gradients,
            "share them among workers with `parallel.zero = 2`, or use fewer threads or fewer `data.grains`",
        ),
        (
            "optimizer",
            one.optimizer,
            "share it among workers with `parallel.zero = 1`, use a simpler optimizer, or on a GPU write `memory.offload = \"optimizer\"`",
        ),
        (
            "activations",
            one.activations,
            "use a smaller `data.batch`, more `data.grains` or fewer threads, or write `memory.recompute = \"blocks\"`",
        ),
        ("scratch", one.scratch, "use fewer threads or more parameter servers"),
        ("evaluation", one.evaluation, "use shorter samples, or leave evaluation out with `data.holdout = 0`"),
        ("data", one.data, "use a smaller `data.cache_max`, if there is a cache, `data.prefetch` or `data.batch`"),
        (
            "checkpoint",
            one.checkpoint,
            "leave out `checkpoint.every` and `best`: the last state is saved without a copy",
        ),
        (
            "copies",
            one.copies,
            "use more workers, which share these copies, or leave out `--elastic` or, with few workers, `parallel.zero`",
        ),
        ("process", one.process, "use a model of fewer layers"),
    ]
}

/// What each part of a plan takes, in one line; of a device with memory of its own, only the parts that there are.
pub(crate) fn by_kind(one: &MemoryPlan, of_device: bool) -> String {
    // Few jobs have copies.
    let shown = kinds(one).into_iter().filter(|(name, bytes, _)| *bytes > 0 || !of_device && *name != "copies");
    shown.map(|(name, bytes, _)| format!("{name} {}", format_bytes(bytes as u64))).collect::<Vec<_>>().join(", ")
}

/// What makes the largest part of a plan smaller.
pub(crate) fn largest_hint(one: &MemoryPlan) -> &'static str {
    kinds(one).into_iter().max_by_key(|(_, bytes, _)| *bytes).map_or("use a smaller model", |(.., hint)| hint)
}

/// What there is, as far as it is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Limits {
    /// Memory and swap space.
    machine: Option<u64>,
    /// What the control group may use.
    group: Option<u64>,
    /// What one process may map.
    process: Option<u64>,
}

impl Limits {
    fn read() -> Self {
        let file = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let machine = file("/proc/meminfo");
        Self {
            machine: Some(kib(&machine, "MemTotal:"))
                .filter(|bytes| *bytes > 0)
                .map(|bytes| bytes + kib(&machine, "SwapTotal:")),
            // What it may swap is another limit; at most all there is.
            group: group_limit().map(|(bytes, _)| bytes.saturating_add(kib(&machine, "SwapTotal:"))),
            process: process(&file("/proc/self/limits")),
        }
    }

    /// The smallest limit that is not enough.
    fn shortage(&self, one: &MemoryPlan, usage: HostUsage) -> Option<Shortage> {
        let limits = [
            (usage.bytes, self.machine, "this machine has"),
            (usage.group_bytes, self.group, "the control group may use"),
            (one.total() as u64, self.process, "a process may map"),
        ];
        let known =
            limits.into_iter().filter_map(|(needed, limit, whose)| Some(Shortage { needed, limit: limit?, whose }));
        known.filter(|shortage| shortage.needed > shortage.limit).min_by_key(|shortage| shortage.limit)
    }
}

/// Bytes, of which `/proc/meminfo` gives the KiB under this name; 0 if it does not.
fn kib(text: &str, name: &str) -> u64 {
    let number = |line: &str| line.strip_prefix(name)?.split_whitespace().next()?.parse::<u64>().ok();
    text.lines().find_map(number).map_or(0, |kib| kib.saturating_mul(1024))
}

/// Bytes of address space, from `/proc/self/limits`.
fn process(text: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix("Max address space"))?;
    rest.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use kolo_comm::{Transport, Watch, thread};
    use std::sync::Arc;

    const PLAN: MemoryPlan = MemoryPlan {
        weights: 1 << 30,
        gradients: 1 << 30,
        optimizer: 2 << 30,
        activations: 4 << 30,
        scratch: 0,
        evaluation: 0,
        data: 0,
        checkpoint: 0,
        copies: 0,
        process: 0,
    };

    fn refused(limits: Limits, processes: usize, share_weights: bool) -> Option<String> {
        let usage = HostUsage::alike(&PLAN, processes, share_weights);
        Some(limits.shortage(&PLAN, usage)?.explain(&PLAN, usage))
    }

    #[test]
    fn the_smallest_limit_is_named() {
        let machine = Limits { machine: Some(16 << 30), ..Limits::default() };
        assert_eq!(refused(machine, 1, false), None);
        assert_eq!(refused(machine, 2, false), None, "just fits");
        let message = refused(machine, 3, false).unwrap();
        assert!(message.starts_with("the job needs 24.0 GiB of memory, but this machine has 16.0 GiB\n"), "{message}");
        assert!(
            message.contains(
                "activations 4.00 GiB, scratch 0 B, evaluation 0 B, data 0 B, checkpoint 0 B, process 0 B for each of 3 workers here"
            ),
            "{message}"
        );
        assert!(message.contains("hint: use fewer workers on a host"), "{message}");
        let both = Limits { group: Some(6 << 30), ..machine };
        let message = refused(both, 3, true).unwrap();
        assert!(
            message.contains("the control group may use 6.00 GiB") && message.contains(" for each of 3"),
            "{message}"
        );
        assert!(message.contains("hint: use a smaller `data.batch`"), "one alone is too large: {message}");
        let own = Limits { process: Some(7 << 30), ..machine };
        assert!(
            refused(own, 1, false).unwrap().contains("hint: use a smaller `data.batch`"),
            "activations are the most"
        );
        assert!(refused(own, 1, false).unwrap().contains("needs 8.00 GiB of memory, but a process may map 7.00 GiB"));
        assert_eq!(refused(Limits::default(), 99, false), None, "nothing is known");
    }

    #[test]
    fn weights_that_are_shared_count_once() {
        let limits = Limits { machine: Some(22 << 30), ..Limits::default() };
        assert_eq!(refused(limits, 3, true), None);
        assert!(refused(limits, 3, false).is_some());
    }

    #[test]
    fn only_ranks_of_the_same_place_count() {
        let needs = |own, shared, groups| Needs { own, shared, groups };
        let all = [needs(5, 0, [1, 1]), needs(6, 0, [1, 1]), needs(7, 0, [1, 2]), needs(9, 0, [2, 1])];
        let usage =
            |processes, bytes, group_bytes, alike, largest| HostUsage { processes, bytes, group_bytes, alike, largest };
        assert_eq!(HostUsage::of(&all[0], &all), usage(3, 18, 11, false, 9));
        assert_eq!(HostUsage::of(&all[2], &all), usage(3, 18, 7, false, 9));
        assert_eq!(HostUsage::of(&all[3], &all), usage(1, 9, 9, true, 9));
        let sharing = [needs(5, 3, [1, 1]); 2];
        assert_eq!(HostUsage::of(&sharing[0], &sharing), usage(2, 13, 13, true, 8));
    }

    #[test]
    fn ranks_tell_each_other_what_they_need() {
        let watches = [Watch::alone(), Watch::alone()];
        let count = |(transport, watch): (Box<dyn Transport>, &Arc<Watch>)| {
            let world = Communicator::new(transport, Arc::clone(watch), true);
            std::thread::spawn(move || {
                let plan = MemoryPlan { scratch: world.rank() << 30, ..PLAN };
                [false, true].map(|share_weights| HostUsage::among(&plan, share_weights, &world).unwrap())
            })
        };
        let threads: Vec<_> = thread::world(&watches).into_iter().zip(&watches).map(count).collect();
        let both = |bytes| HostUsage { processes: 2, bytes, group_bytes: bytes, alike: false, largest: 9 << 30 };
        for thread in threads {
            assert_eq!(thread.join().unwrap(), [both(17 << 30), both(16 << 30)]);
        }
    }

    #[test]
    fn limits_are_read_from_the_kernels_words() {
        let text = "MemTotal:       1000 kB\nMemFree: 1 kB\nSwapTotal:  24 kB\n";
        assert_eq!((kib(text, "MemTotal:"), kib(text, "SwapTotal:"), kib("", "MemTotal:")), (1_024_000, 24_576, 0));
        assert_eq!(
            process("Limit  Soft Limit\nMax address space         300000000            unlimited            bytes\n"),
            Some(300_000_000)
        );
        assert_eq!(process("Max address space         unlimited            unlimited            bytes\n"), None);
        assert!(Limits::read().machine.is_none_or(|bytes| bytes > 1 << 20));
    }
}
