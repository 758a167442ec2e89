//! Before a collective moves data, all ranks learn that they made the same call — or who did not.

use super::group::{MpiGroup, Wait};
use crate::call::{CallKind, FINGERPRINT_BYTES, Fingerprint};
use crate::fault::Fault;
use crate::task::{CollectiveTask, RankPart};
use crate::watch::Watch;
use std::ffi::c_int;

/// How a collective can run. All ranks take the least of what each could do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum CollectiveForm {
    /// As a program over messages.
    Program = 0,
    /// Natively, with counts and offsets for each rank.
    Parts = 1,
    /// Natively, with parts of one size, one behind the other.
    Plain = 2,
}

const FINGERPRINT_WORDS: usize = FINGERPRINT_BYTES / 8;
/// A fingerprint and the digest of the whole call.
const RECORD_WORDS: usize = FINGERPRINT_WORDS + 1;

/// A digest of all that the ranks must agree on: the fingerprint, and the counts of the parts.
fn digest(task: &CollectiveTask<'_>) -> i64 {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&task.fingerprint.encode());
    if task.kind() != CallKind::AllToAll {
        for part in task.recv {
            hasher.update(&(part.count as u64).to_le_bytes());
        }
    }
    let bytes = hasher.finalize();
    i64::from_le_bytes(std::array::from_fn(|at| bytes.as_bytes()[at]))
}

impl MpiGroup {
    /// The smallest of each word over all ranks, in place.
    fn least(&self, words: &mut [i64], wait: Wait<'_>) -> Result<(), Fault> {
        let constants = &self.library().constants;
        let (long, least) = (constants.long(), constants.operation(crate::Reduction::Min));
        let (input, output, count) = (constants.in_place, words.as_mut_ptr().cast(), words.len() as c_int);
        // SAFETY: the words live until the call is done.
        self.complete("Iallreduce", wait, |f, request| unsafe {
            (f.iallreduce)(input, output, count, long, least, self.comm, request)
        })
    }

    /// Returns when all ranks are in this call, with the form that all can run; or with who disagrees.
    pub fn agree(
        &self,
        task: &CollectiveTask<'_>,
        form: CollectiveForm,
        watch: &Watch,
    ) -> Result<CollectiveForm, Fault> {
        let wait = Wait { watch, during: &task.fingerprint, bytes: 0 };
        let mine = digest(task);
        let mut words = [mine, !mine, form as i64];
        self.least(&mut words, wait)?;
        if words[0] != !words[1] {
            return Err(self.disagreement(task, mine, wait)?);
        }
        Ok(match words[2] {
            0 => CollectiveForm::Program,
            1 => CollectiveForm::Parts,
            _ => CollectiveForm::Plain,
        })
    }

    /// Who disagrees with most: the same answer on all ranks.
    fn disagreement(&self, task: &CollectiveTask<'_>, mine: i64, wait: Wait<'_>) -> Result<Fault, Fault> {
        let mut record = [mine; RECORD_WORDS];
        for (word, bytes) in record.iter_mut().zip(task.fingerprint.encode().chunks_exact(8)) {
            *word = i64::from_le_bytes(std::array::from_fn(|at| bytes[at]));
        }
        let mut all = vec![0; RECORD_WORDS * self.size()];
        self.gather_longs(&record, &mut all, wait)?;
        let records: Vec<&[i64]> = all.chunks_exact(RECORD_WORDS).collect();
        let (one, other) = odd_one_out(&records.iter().map(|record| record[FINGERPRINT_WORDS]).collect::<Vec<_>>());
        let fingerprint = |rank: usize| decode(records[rank]).unwrap_or(task.fingerprint);
        let (mine, theirs) = (fingerprint(one), fingerprint(other));
        if mine == theirs {
            return Ok(Fault::BadCall(format!(
                "ranks disagree: {} and {} called {mine}, but with parts of different sizes\n  hint: all ranks must give \
                 the same count for each rank",
                self.rank_name(one, wait.watch),
                self.rank_name(other, wait.watch)
            )));
        }
        let (rank, peer) = (self.world_rank(one), self.world_rank(other));
        Ok(Fault::Mismatch {
            rank,
            host: wait.watch.host(rank),
            mine: Box::new(mine),
            peer,
            peer_host: wait.watch.host(peer),
            theirs: Box::new(theirs),
        })
    }

    /// For all-to-all, whose counts are known in pairs only: whether what each rank sends is what the other expects.
    pub fn agree_on_pairs(&self, task: &CollectiveTask<'_>, watch: &Watch) -> Result<(), Fault> {
        let wait = Wait { watch, during: &task.fingerprint, bytes: 0 };
        let long = self.library().constants.long();
        let sent: Vec<i64> = task.send.iter().map(|part| part.count as i64).collect();
        let mut coming = vec![0i64; self.size()];
        let (input, output) = (sent.as_ptr().cast(), coming.as_mut_ptr().cast());
        // SAFETY: one integer for each rank; the buffers live until the call is done.
        self.complete("Ialltoall", wait, |f, request| unsafe {
            (f.ialltoall)(input, 1, long, output, 1, long, self.comm, request)
        })?;
        let differs = |(coming, part): (&i64, &RankPart)| *coming != part.count as i64;
        let wrong = coming.iter().zip(task.recv).position(differs);
        // The first receiver that finds something wrong tells all what it is.
        let mut first = [wrong.map_or(self.size(), |_| self.rank()) as i64];
        self.least(&mut first, wait)?;
        let Some(receiver) = usize::try_from(first[0]).ok().filter(|rank| *rank < self.size()) else { return Ok(()) };
        let own = wrong.map_or([0; 3], |sender| [sender as i64, coming[sender], task.recv[sender].count as i64]);
        let mut all = vec![0; own.len() * self.size()];
        self.gather_longs(&own, &mut all, wait)?;
        let [sender, coming, expected] = std::array::from_fn(|at| all[own.len() * receiver + at]);
        Err(Fault::BadCall(format!(
            "ranks disagree: in {}, {} expects {expected} elements from {}, which sends {coming}\n  hint: a rank must send \
             exactly as much as the other one expects",
            task.fingerprint,
            self.rank_name(receiver, watch),
            self.rank_name((sender as usize).min(self.size() - 1), watch),
        )))
    }
}

fn decode(record: &[i64]) -> Option<Fingerprint> {
    let mut bytes = [0; FINGERPRINT_BYTES];
    for (slot, word) in bytes.chunks_exact_mut(8).zip(record) {
        slot.copy_from_slice(&word.to_le_bytes());
    }
    Fingerprint::decode(&bytes)
}

/// One rank of the largest camp (of rank 0's, if there are several), and the first that is in none of it.
fn odd_one_out(digests: &[i64]) -> (usize, usize) {
    let camp = |digest: i64| digests.iter().filter(|other| **other == digest).count();
    let mut one = 0;
    for rank in 0..digests.len() {
        if camp(digests[rank]) > camp(digests[one]) {
            one = rank;
        }
    }
    (one, digests.iter().position(|digest| *digest != digests[one]).unwrap_or(one))
}

#[cfg(test)]
mod tests {
    use super::odd_one_out;

    #[test]
    fn the_few_are_blamed() {
        assert_eq!(odd_one_out(&[5, 5, 7, 5]), (0, 2));
        assert_eq!(odd_one_out(&[7, 5, 5, 5]), (1, 0));
        assert_eq!(odd_one_out(&[1, 2]), (0, 1));
    }
}
