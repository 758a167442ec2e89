//! One rank of a communicator over MPI.

use super::agree::CollectiveForm;
use super::group::MpiGroup;
use super::native::{self, Native};
use super::wire::MpiWire;
use crate::fault::Fault;
use crate::run::Programs;
use crate::task::CollectiveTask;
use crate::transport::Transport;
use crate::watch::Watch;
use crate::wire::SplitWire;
use std::sync::Arc;

pub(super) struct MpiTransport {
    group: Arc<MpiGroup>,
    programs: Programs<MpiWire>,
    watch: Arc<Watch>,
    piece_bytes: usize,
    /// A failed communicator stays failed.
    failed: Option<Fault>,
}

impl MpiTransport {
    /// Takes over a group of its own. Longer vectors and messages than `piece_bytes` go in pieces.
    pub fn boxed(group: MpiGroup, watch: Arc<Watch>, piece_bytes: usize) -> Result<Box<dyn Transport>, Fault> {
        let wire = MpiWire::new(Arc::new(group), Arc::clone(&watch), piece_bytes);
        let mut transport = Self::over(wire, watch, piece_bytes);
        transport.programs.measure()?;
        Ok(Box::new(transport))
    }

    fn over(wire: MpiWire, watch: Arc<Watch>, piece_bytes: usize) -> Self {
        let group = Arc::clone(&wire.group);
        let programs = Programs::new(wire, Arc::clone(&watch));
        Self { group, programs, watch, piece_bytes, failed: None }
    }
}

impl MpiTransport {
    /// # Safety
    /// As [`Transport::run`].
    unsafe fn attempt(&mut self, task: &CollectiveTask<'_>) -> Result<(), Fault> {
        let mut form = native::form(task);
        if !task.kind().is_message() {
            form = self.group.agree(task, form, &self.watch)?;
        }
        if form == CollectiveForm::Program {
            // SAFETY: the caller's promise, passed on.
            return unsafe { self.programs.run(task) };
        }
        let native = Native { group: &self.group, task, watch: &self.watch, piece_bytes: self.piece_bytes };
        // SAFETY: the caller's promise, passed on.
        unsafe { native.run(form) }
    }
}

impl Transport for MpiTransport {
    fn name(&self) -> &'static str {
        "mpi"
    }

    fn rank(&self) -> usize {
        self.group.rank()
    }

    fn size(&self) -> usize {
        self.group.size()
    }

    unsafe fn run(&mut self, task: &CollectiveTask<'_>) -> Result<(), Fault> {
        if let Some(fault) = &self.failed {
            return Err(fault.clone());
        }
        // SAFETY: the caller's promise, passed on.
        unsafe { self.attempt(task) }.inspect_err(|fault| self.failed = Some(fault.clone()))
    }

    fn split(&mut self, members: &[usize], communicator: u32) -> Result<Box<dyn Transport>, Fault> {
        let wire = self.programs.wire.split(members, communicator)?;
        let mut child = Self::over(wire, Arc::clone(&self.watch), self.piece_bytes);
        child.programs.set_costs(self.programs.costs());
        Ok(Box::new(child))
    }
}
