//! How a failure travels to the other ranks, so that all of them name the same culprit.
//!
//! A byte for the sort, then two ranks of the job, then two fingerprints for a mismatch or text for the others.

use crate::call::{FINGERPRINT_BYTES, Fingerprint};
use crate::fault::Fault;
use crate::watch::Watch;
use kolo_base::ByteReader;

/// Largest failure report.
pub const FAILURE_BYTES_MAX: usize = 1024;

const MISMATCH: u8 = 1;
const LOST: u8 = 2;
const STALLED: u8 = 3;
const FAILED: u8 = 4;

/// Ranks in the fault are ranks of the job.
pub fn encode(fault: &Fault) -> Vec<u8> {
    // A rank that was told passes on whom it was told of; the reader puts itself in the place of `own`.
    let own = u32::MAX as usize;
    let (sort, ranks, rest) = match fault {
        Fault::Mismatch { rank, mine, peer, theirs, .. } => {
            (MISMATCH, (*rank, *peer), [mine.encode(), theirs.encode()].concat())
        }
        Fault::Lost { peer, why, .. } => (LOST, (*peer, 0), why.as_bytes().to_vec()),
        Fault::Stalled { peer, waited_ms, .. } => (STALLED, (*peer, 0), waited_ms.to_le_bytes().to_vec()),
        Fault::Failed { peer, why, .. } => (FAILED, (*peer, 0), why.as_bytes().to_vec()),
        Fault::Aborted(_)
        | Fault::Regroup { .. }
        | Fault::BadCall(_)
        | Fault::Rejected { .. }
        | Fault::System { .. } => (FAILED, (own, 0), fault.to_string().into_bytes()),
    };
    let mut bytes = vec![sort];
    bytes.extend_from_slice(&(ranks.0 as u32).to_le_bytes());
    bytes.extend_from_slice(&(ranks.1 as u32).to_le_bytes());
    bytes.extend_from_slice(&rest);
    bytes.truncate(FAILURE_BYTES_MAX);
    bytes
}

/// The fault that rank `from` told of, as rank `own` sees it, which is in this call. `None` if it is no failure report.
pub fn decode(bytes: &[u8], from: usize, own: usize, call: Option<&Fingerprint>, watch: &Watch) -> Option<Fault> {
    let mut reader = ByteReader::new(bytes);
    let (sort, first, second) = (reader.u8()?, reader.u32()?, reader.u32()? as usize);
    let rest = reader.rest();
    let text = || String::from_utf8_lossy(rest).into_owned();
    let first = if first == u32::MAX { from } else { first as usize };
    let (peer, host) = (first, watch.host(first));
    let during = call.map_or_else(|| "a call".into(), ToString::to_string);
    Some(match sort {
        MISMATCH => {
            let mut calls =
                rest.chunks_exact(FINGERPRINT_BYTES).filter_map(|call| Fingerprint::decode(call.try_into().ok()?));
            let (one, other) = ((first, calls.next()?), (second, calls.next()?));
            // On this rank's side is itself, or whoever made the same call: the other one is odd.
            let turned = other.0 == own || (one.0 != own && call == Some(&other.1));
            let ((rank, mine), (peer, theirs)) = if turned { (other, one) } else { (one, other) };
            let (host, peer_host) = (watch.host(rank), watch.host(peer));
            Fault::Mismatch { rank, host, mine: Box::new(mine), peer, peer_host, theirs: Box::new(theirs) }
        }
        LOST if first == own => {
            Fault::Failed { peer: from, host: watch.host(from), why: format!("it lost this rank: {}", text()) }
        }
        LOST => Fault::Lost { peer, host, during, why: text() },
        STALLED => {
            let waited_ms = reader.u64()?;
            Fault::Stalled { peer, host, during, waited_ms }
        }
        FAILED => Fault::Failed { peer, host, why: text() },
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::{CallKind, short_name};
    use crate::element::{ElementType, Reduction};
    use std::sync::Arc;

    fn watch() -> Arc<Watch> {
        Watch::new(["a", "b", "c"].map(String::from).to_vec(), std::time::Duration::from_secs(1))
    }

    #[test]
    fn accounts_name_the_culprit() {
        let call = Fingerprint {
            communicator: 3,
            kind: CallKind::AllReduce,
            element: ElementType::Bf16,
            reduction: Reduction::Max,
            root: 2,
            sequence: 1 << 40,
            count: 77,
            name: short_name("bucket 3"),
        };
        let (mine, theirs) = (Box::new(call), Box::new(Fingerprint { count: 78, ..call }));
        let mismatch = Fault::Mismatch { rank: 0, host: "a".into(), mine, peer: 2, peer_host: "c".into(), theirs };
        let failure = encode(&mismatch);
        assert_eq!(decode(&failure, 0, 1, Some(&call), &watch()), Some(mismatch));
        for (own, count) in [(2, 0), (1, 78)] {
            let own_call = Fingerprint { count, ..call };
            let fault = decode(&failure, 0, own, Some(&own_call), &watch()).unwrap();
            assert!(matches!(&fault, Fault::Mismatch { rank: 2, peer: 0, mine, .. } if mine.count == 78), "{fault}");
        }
        let lost = Fault::Lost { peer: 2, host: "c".into(), during: String::new(), why: "x".repeat(5000) };
        let told = decode(&encode(&lost), 0, 1, None, &watch()).unwrap();
        assert_eq!(told.culprit(), Some(2));
        assert!(told.to_string().starts_with("rank 2 on c was lost during a call: xxx"), "{told}");
        assert_eq!(decode(&encode(&lost), 0, 2, None, &watch()).unwrap().culprit(), Some(0));
        assert_eq!(decode(&[1; 30], 0, 1, None, &watch()), None);
    }

    #[test]
    fn a_failure_keeps_its_owner_from_mouth_to_mouth() {
        let told = decode(&encode(&Fault::BadCall("no".into())), 1, 0, None, &watch()).unwrap();
        assert_eq!(told.to_string(), "rank 1 on b failed: no");
        assert_eq!(decode(&encode(&told), 2, 0, None, &watch()), Some(told));
    }
}
