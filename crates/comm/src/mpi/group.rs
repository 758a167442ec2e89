//! A communicator of MPI: its ranks, and calls on it that end.

use super::MpiRuntime;
use super::abi::Handle;
use super::library::{Functions, Library, MpiStatus};
use crate::fault::{Fault, rank_name};
use crate::watch::{Backoff, Pause, Watch};
use std::ffi::c_int;
use std::fmt::Display;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

/// MPI moves data only while it is tested: so long, a waiting rank tests again and again, and only yields.
const EAGER: Duration = Duration::from_millis(5);
/// For large calls longer, at this pace.
const EAGER_BYTES_PER_MS: usize = 100_000;
/// How often a rank that has waited longer looks again.
const POLL_INTERVAL: Duration = Duration::from_micros(100);

#[derive(Debug)]
pub(super) struct MpiGroup {
    runtime: Arc<MpiRuntime>,
    pub comm: Handle,
    rank: usize,
    /// The rank in the world of each member: what people and watches know a rank by.
    world: Arc<[usize]>,
    /// The number of each member's host.
    hosts: Arc<[usize]>,
    owned: bool,
    /// Calls completed or waited for: the same on all ranks at the same place.
    pub turns: AtomicI64,
}

/// A call that is waited for, for messages.
#[derive(Clone, Copy)]
pub(super) struct Wait<'a> {
    pub watch: &'a Watch,
    pub during: &'a dyn Display,
    pub bytes: usize,
}

impl MpiGroup {
    pub fn world(runtime: Arc<MpiRuntime>) -> Result<Self, Fault> {
        let comm = runtime.library.constants.world;
        let (mut rank, mut size): (c_int, c_int) = (0, 0);
        // SAFETY: initialised, and the communicator is MPI's own.
        runtime.library.call("Comm_rank", |f| unsafe { (f.comm_rank)(comm, &mut rank) })?;
        // SAFETY: as above.
        runtime.library.call("Comm_size", |f| unsafe { (f.comm_size)(comm, &mut size) })?;
        let world = (0..size as usize).collect();
        let hosts = vec![0; size as usize].into();
        Ok(Self { runtime, comm, rank: rank as usize, world, hosts, owned: false, turns: AtomicI64::new(0) })
    }

    /// Ranks with the same number share a host.
    pub fn set_hosts(&mut self, hosts: Vec<usize>) {
        assert_eq!(hosts.len(), self.size(), "a host for each rank");
        self.hosts = hosts.into();
    }

    pub fn hosts(&self) -> &[usize] {
        &self.hosts
    }

    pub fn library(&self) -> &Library {
        &self.runtime.library
    }

    pub fn runtime(&self) -> &MpiRuntime {
        &self.runtime
    }

    pub fn rank(&self) -> usize {
        self.rank
    }

    pub fn size(&self) -> usize {
        self.world.len()
    }

    /// The number of a member in the world.
    pub fn world_rank(&self, rank: usize) -> usize {
        self.world[rank]
    }

    /// Such as `rank 3 on node7`.
    pub fn rank_name(&self, rank: usize, watch: &Watch) -> String {
        rank_name(self.world[rank], &watch.host(self.world[rank]))
    }

    /// The same ranks, with messages of their own. All of them call it.
    pub fn duplicate(&self, watch: &Watch) -> Result<Self, Fault> {
        // The call itself waits for all, and cannot be told for how long.
        self.barrier(watch)?;
        let mut comm: Handle = 0;
        // SAFETY: a communicator of this session; all ranks are here.
        self.library().call("Comm_dup", |f| unsafe { (f.comm_dup)(self.comm, &mut comm) })?;
        self.adopt(comm, &(0..self.size()).collect::<Vec<_>>(), self.rank)
    }

    /// The communicator of these ranks, this one among them, all of which call it and are here already.
    pub fn subset(&self, members: &[usize], number: u32) -> Result<Self, Fault> {
        let Some(rank) = members.iter().position(|member| *member == self.rank) else {
            return Err(Fault::BadCall(format!("rank {} is not in the group it makes", self.rank)));
        };
        if members.iter().any(|member| *member >= self.size()) {
            return Err(Fault::BadCall(format!("a group of ranks beyond {}", self.size())));
        }
        let ranks: Vec<c_int> = members.iter().map(|member| *member as c_int).collect();
        let (mut all, mut chosen, mut comm): (Handle, Handle, Handle) = (0, 0, 0);
        // SAFETY: handles of this session; the ranks exist.
        self.library().call("Comm_group", |f| unsafe { (f.comm_group)(self.comm, &mut all) })?;
        let count = ranks.len() as c_int;
        // SAFETY: as above.
        self.library().call("Group_incl", |f| unsafe { (f.group_incl)(all, count, ranks.as_ptr(), &mut chosen) })?;
        let (library, tag) = (self.library(), (number % TAGS) as c_int);
        // SAFETY: as above.
        library.call("Comm_create_group", |f| unsafe { (f.comm_create_group)(self.comm, chosen, tag, &mut comm) })?;
        for mut group in [all, chosen] {
            // SAFETY: made above, and not used any more.
            self.library().call("Group_free", |f| unsafe { (f.group_free)(&mut group) })?;
        }
        self.adopt(comm, members, rank)
    }

    fn adopt(&self, comm: Handle, members: &[usize], rank: usize) -> Result<Self, Fault> {
        let errors_return = self.library().constants.errors_return;
        // SAFETY: a fresh communicator and the library's own handler.
        self.library().call("Comm_set_errhandler", |f| unsafe { (f.comm_set_errhandler)(comm, errors_return) })?;
        let runtime = Arc::clone(&self.runtime);
        let world = members.iter().map(|member| self.world[*member]).collect();
        let hosts = members.iter().map(|member| self.hosts[*member]).collect();
        Ok(Self { runtime, comm, rank, world, hosts, owned: true, turns: AtomicI64::new(0) })
    }

    /// Whether a request is done.
    pub fn test(&self, request: &mut Handle) -> Result<bool, Fault> {
        let (mut done, mut status): (c_int, MpiStatus) = (0, MpiStatus::new());
        // SAFETY: a request of this library.
        self.library().call("Test", |f| unsafe { (f.test)(request, &mut done, &mut status) })?;
        Ok(done != 0)
    }

    /// Starts a nonblocking call and waits for its end. When the wait ends otherwise the library is given up, as MPI has
    /// no way to take a collective back and its buffers are the caller's again.
    pub fn complete(
        &self,
        name: &str,
        wait: Wait<'_>,
        start: impl FnOnce(&Functions, *mut Handle) -> c_int,
    ) -> Result<(), Fault> {
        let mut request: Handle = 0;
        self.turns.fetch_add(1, Ordering::Relaxed);
        self.library().call(name, |f| start(f, &mut request)).map_err(|fault| self.explain(fault, wait))?;
        let eager = EAGER + Duration::from_millis((wait.bytes / EAGER_BYTES_PER_MS) as u64);
        let mut backoff = Backoff::new(wait.watch);
        let mut report = None;
        let mut turn = || {
            if self.test(&mut request)? {
                return Ok(true);
            }
            if report.is_none() && backoff.waited() > wait.watch.stall() / 2 {
                report = Some(self.report()?);
            }
            match backoff.turn(|waited_ms| self.stalled(wait, waited_ms))? {
                Pause::Sleep(_) if backoff.waited() > eager => std::thread::sleep(POLL_INTERVAL),
                Pause::Sleep(_) => std::thread::yield_now(),
                Pause::Spin | Pause::Yield => {}
            }
            Ok(false)
        };
        let given_up = |fault| {
            self.library().give_up();
            self.explain(fault, wait)
        };
        while !turn().map_err(given_up)? {}
        report.into_iter().for_each(|report| self.retract(report));
        Ok(())
    }

    /// Says where it was that MPI refused.
    fn explain(&self, fault: Fault, wait: Wait<'_>) -> Fault {
        match fault {
            Fault::System { what, error } => {
                let place = self.rank_name(self.rank, wait.watch);
                Fault::System { what: format!("{what} for {} on {place}", wait.during), error }
            }
            other => other,
        }
    }

    /// Waits until all are here.
    pub fn barrier(&self, watch: &Watch) -> Result<(), Fault> {
        let wait = Wait { watch, during: &"connecting all ranks over MPI", bytes: 0 };
        // SAFETY: a communicator of this session.
        self.complete("Ibarrier", wait, |f, request| unsafe { (f.ibarrier)(self.comm, request) })
    }

    /// Everybody's bytes, in rank order, none longer than `most`.
    pub fn gather_blobs(&self, mine: &[u8], most: usize, watch: &Watch) -> Result<Vec<Vec<u8>>, Fault> {
        let byte = self.library().constants.byte();
        let wait = Wait { watch, during: &"the exchange of addresses over MPI", bytes: 0 };
        let mut all = vec![0i64; self.size()];
        self.gather_longs(&[mine.len() as i64], &mut all, wait)?;
        if let Some(long) = all.iter().position(|bytes| !(0..=most as i64).contains(bytes)) {
            let why = format!("{} bytes at once; at most {most} are allowed", all[long]);
            return Err(Fault::Rejected { from: self.rank_name(long, watch), why });
        }
        let widest = all.iter().copied().max().unwrap_or(0) as usize;
        let mut padded = mine.to_vec();
        padded.resize(widest, 0);
        let mut blobs = vec![0u8; widest * self.size()];
        let (input, output, count) = (padded.as_ptr().cast(), blobs.as_mut_ptr().cast(), widest as c_int);
        // SAFETY: the buffers hold `widest` bytes, and that for each rank; they live until the call is done.
        self.complete("Iallgather", wait, |f, request| unsafe {
            (f.iallgather)(input, count, byte, output, count, byte, self.comm, request)
        })?;
        let blob = |(rank, bytes): (usize, &i64)| blobs[rank * widest..][..*bytes as usize].to_vec();
        Ok(all.iter().enumerate().map(blob).collect())
    }

    /// The same number of integers from each rank, to all.
    pub fn gather_longs(&self, mine: &[i64], all: &mut [i64], wait: Wait<'_>) -> Result<(), Fault> {
        assert_eq!(all.len(), mine.len() * self.size(), "room for each rank");
        let long = self.library().constants.long();
        let (input, output, count) = (mine.as_ptr().cast(), all.as_mut_ptr().cast(), mine.len() as c_int);
        // SAFETY: checked above; the buffers live until the call is done.
        self.complete("Iallgather", wait, |f, request| unsafe {
            (f.iallgather)(input, count, long, output, count, long, self.comm, request)
        })
    }
}

/// Tags that every MPI has.
const TAGS: u32 = 32_768;

impl Drop for MpiGroup {
    fn drop(&mut self) {
        if self.owned && !self.library().is_given_up() {
            let mut comm = self.comm;
            // SAFETY: ours, and nobody uses it any more.
            let _ = self.library().call("Comm_free", |f| unsafe { (f.comm_free)(&mut comm) });
        }
    }
}
