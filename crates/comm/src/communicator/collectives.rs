//! The collectives, typed.

use super::{Communicator, Request};
use crate::call::CallKind;
use crate::element::{ElementType, Reduction, Scalar};
use crate::fault::Fault;
use crate::task::{even_parts, packed_parts};

/// Elements of all parts; more than there is memory for is refused later.
fn total(counts: &[usize]) -> usize {
    counts.iter().fold(0, |sum, count| sum.saturating_add(*count))
}

impl Communicator {
    /// Runs a request whose buffers are borrowed by the caller's arguments.
    fn now(&self, request: Request) -> Result<(), Fault> {
        // SAFETY: the typed methods below take their buffers from borrows that outlive the call.
        unsafe { self.call(&request) }
    }

    pub fn barrier(&self) -> Result<(), Fault> {
        self.now(Request::new(CallKind::Barrier, ElementType::U8))
    }

    /// The root's data, to all.
    pub fn broadcast<T: Scalar>(&self, data: &mut [T], root: usize) -> Result<(), Fault> {
        let count = data.len();
        self.now(Request { root, count, ..Request::new(CallKind::Broadcast, T::ELEMENT).output(data) })
    }

    pub fn all_reduce<T: Scalar>(&self, data: &mut [T], reduction: Reduction) -> Result<(), Fault> {
        let count = data.len();
        self.now(Request { reduction, count, ..Request::new(CallKind::AllReduce, T::ELEMENT).in_place(data) })
    }

    /// Combines all ranks' inputs into the root's `output`; the others' stays as it is.
    pub fn reduce<T: Scalar>(
        &self,
        input: &[T],
        output: &mut [T],
        reduction: Reduction,
        root: usize,
    ) -> Result<(), Fault> {
        let request = Request::new(CallKind::Reduce, T::ELEMENT).input(input).output(output);
        self.now(Request { reduction, root, count: input.len(), ..request })
    }

    /// Combines all inputs and leaves each rank its equal part.
    pub fn reduce_scatter<T: Scalar>(&self, input: &[T], output: &mut [T], reduction: Reduction) -> Result<(), Fault> {
        self.reduce_scatter_v(input, output, &self.equal(input.len()), reduction)
    }

    /// With parts of these counts.
    pub fn reduce_scatter_v<T: Scalar>(
        &self,
        input: &[T],
        output: &mut [T],
        counts: &[usize],
        reduction: Reduction,
    ) -> Result<(), Fault> {
        let request = Request::new(CallKind::ReduceScatter, T::ELEMENT).input(input).output(output);
        self.now(Request { reduction, count: total(counts), recv: packed_parts(counts).into(), ..request })
    }

    /// Equal parts of all ranks, to the root.
    pub fn gather<T: Scalar>(&self, input: &[T], output: &mut [T], root: usize) -> Result<(), Fault> {
        self.gather_v(input, output, &vec![input.len(); self.size()], root)
    }

    pub fn gather_v<T: Scalar>(
        &self,
        input: &[T],
        output: &mut [T],
        counts: &[usize],
        root: usize,
    ) -> Result<(), Fault> {
        let request = Request::new(CallKind::Gather, T::ELEMENT).input(input).output(output);
        self.now(Request { root, count: total(counts), recv: packed_parts(counts).into(), ..request })
    }

    /// Equal parts of all ranks, to all.
    pub fn all_gather<T: Scalar>(&self, input: &[T], output: &mut [T]) -> Result<(), Fault> {
        self.all_gather_v(input, output, &vec![input.len(); self.size()])
    }

    pub fn all_gather_v<T: Scalar>(&self, input: &[T], output: &mut [T], counts: &[usize]) -> Result<(), Fault> {
        let request = Request::new(CallKind::AllGather, T::ELEMENT).input(input).output(output);
        self.now(Request { count: total(counts), recv: packed_parts(counts).into(), ..request })
    }

    /// The root's input, an equal part to each.
    pub fn scatter<T: Scalar>(&self, input: &[T], output: &mut [T], root: usize) -> Result<(), Fault> {
        self.scatter_v(input, output, &vec![output.len(); self.size()], root)
    }

    pub fn scatter_v<T: Scalar>(
        &self,
        input: &[T],
        output: &mut [T],
        counts: &[usize],
        root: usize,
    ) -> Result<(), Fault> {
        let request = Request::new(CallKind::Scatter, T::ELEMENT).input(input).output(output);
        self.now(Request { root, count: total(counts), recv: packed_parts(counts).into(), ..request })
    }

    /// Part `j` of rank `i`'s input becomes part `i` of rank `j`'s output. All parts have one size.
    pub fn all_to_all<T: Scalar>(&self, input: &[T], output: &mut [T]) -> Result<(), Fault> {
        if !input.len().is_multiple_of(self.size()) {
            let (count, size) = (input.len(), self.size());
            return Err(Fault::BadCall(format!(
                "all_to_all of {count} elements, which is not a multiple of {size} ranks"
            )));
        }
        let counts = self.equal(input.len());
        self.all_to_all_v(input, &counts, output, &counts)
    }

    pub fn all_to_all_v<T: Scalar>(
        &self,
        input: &[T],
        send: &[usize],
        output: &mut [T],
        recv: &[usize],
    ) -> Result<(), Fault> {
        let request = Request::new(CallKind::AllToAll, T::ELEMENT).input(input).output(output);
        self.now(Request { send: packed_parts(send).into(), recv: packed_parts(recv).into(), ..request })
    }

    /// The combination of this rank's data and that of all before it.
    pub fn scan<T: Scalar>(&self, data: &mut [T], reduction: Reduction) -> Result<(), Fault> {
        let count = data.len();
        self.now(Request { reduction, count, ..Request::new(CallKind::Scan, T::ELEMENT).in_place(data) })
    }

    /// The combination of the data of all ranks before this one; rank 0's stays as it is.
    pub fn exclusive_scan<T: Scalar>(&self, data: &mut [T], reduction: Reduction) -> Result<(), Fault> {
        let count = data.len();
        self.now(Request { reduction, count, ..Request::new(CallKind::ExclusiveScan, T::ELEMENT).in_place(data) })
    }

    pub fn send<T: Scalar>(&self, data: &[T], to: usize) -> Result<(), Fault> {
        self.now(Request { peer: to, count: data.len(), ..Request::new(CallKind::Send, T::ELEMENT).input(data) })
    }

    pub fn recv<T: Scalar>(&self, data: &mut [T], from: usize) -> Result<(), Fault> {
        let count = data.len();
        self.now(Request { peer: from, count, ..Request::new(CallKind::Recv, T::ELEMENT).output(data) })
    }

    fn equal(&self, count: usize) -> Vec<usize> {
        even_parts(count, self.size()).iter().map(|part| part.count).collect()
    }
}
