//! What every call is checked for before it gets its number.

use super::{CALL_BYTES_MAX, Communicator, Request};
use crate::call::CallKind;
use crate::element::Reduction;
use crate::fault::Fault;
use crate::run::in_place;
use crate::task::RankPart;

impl Communicator {
    /// Refuses what no transport could do.
    pub(super) fn check(&self, request: &Request) -> Result<(), Fault> {
        let bad = |text: String| Err(Fault::BadCall(text));
        let size = self.size();
        if request.root >= size {
            return bad(format!("{} with root {}, but there are {size} ranks", request.kind.name(), request.root));
        }
        if request.kind.is_message() && (request.peer >= size || request.peer == self.rank()) {
            return bad(format!(
                "{} between rank {} and itself or a rank that does not exist ({})",
                request.kind.name(),
                self.rank(),
                request.peer
            ));
        }
        if request.input_bytes.max(request.output_bytes) > CALL_BYTES_MAX {
            return bad(format!("{} of more than {CALL_BYTES_MAX} bytes", request.kind.name()));
        }
        let needs_parts = matches!(
            request.kind,
            CallKind::ReduceScatter | CallKind::Gather | CallKind::AllGather | CallKind::Scatter | CallKind::AllToAll
        );
        if needs_parts && request.recv.len() != size {
            return bad(format!("{} with {} parts for {size} ranks", request.kind.name(), request.recv.len()));
        }
        if request.kind == CallKind::AllToAll && request.send.len() != size {
            return bad(format!("all_to_all with {} parts to send for {size} ranks", request.send.len()));
        }
        if matches!(request.reduction, Reduction::Mean)
            && matches!(request.kind, CallKind::Scan | CallKind::ExclusiveScan)
        {
            return bad("a scan has no mean; use sum".into());
        }
        let (input, output) = self.spans(request);
        let width = request.element.bytes();
        if input.saturating_mul(width) > request.input_bytes {
            return bad(format!(
                "{} reads {input} elements, but the input has {}",
                request.kind.name(),
                request.input_bytes / width
            ));
        }
        if output.saturating_mul(width) > request.output_bytes {
            return bad(format!(
                "{} writes {output} elements, but the output has {}",
                request.kind.name(),
                request.output_bytes / width
            ));
        }
        let fingerprint = self.shared.fingerprint(request, 0);
        in_place(&self.shared.task(request, fingerprint), self.rank(), size).map(|_| ())
    }

    /// Elements the request reaches of its input and output.
    fn spans(&self, request: &Request) -> (usize, usize) {
        let end = |parts: &[RankPart]| {
            parts.iter().filter(|p| p.count > 0).map(|part| part.offset.saturating_add(part.count)).max().unwrap_or(0)
        };
        let own = request.recv.get(self.rank()).map_or(0, |part| part.count);
        let root = request.root == self.rank();
        match request.kind {
            CallKind::Barrier => (0, 0),
            CallKind::Broadcast | CallKind::Recv => (0, request.count),
            CallKind::Send => (request.count, 0),
            CallKind::Reduce => (request.count, if root { request.count } else { 0 }),
            CallKind::AllReduce | CallKind::Scan | CallKind::ExclusiveScan => (request.count, request.count),
            CallKind::ReduceScatter => (end(&request.recv), own),
            CallKind::Gather => (own, if root { end(&request.recv) } else { 0 }),
            CallKind::AllGather => (own, end(&request.recv)),
            CallKind::Scatter => (if root { end(&request.recv) } else { 0 }, own),
            CallKind::AllToAll => (end(&request.send), end(&request.recv)),
        }
    }
}
