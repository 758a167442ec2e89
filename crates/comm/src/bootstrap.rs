//! A bootstrap for ranks that are threads of one process.

use crate::fault::Fault;
use crate::transport::Bootstrap;
use kolo_base::{lock, wait_timeout};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

/// How long a rank waits for one that does not come.
const WAIT_MAX: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// What the ranks have given, round by round and rank by rank.
type ExchangedBlobs = Vec<Vec<Option<Vec<u8>>>>;

/// Where the threads exchange their blobs.
#[derive(Debug)]
pub struct ThreadExchange {
    size: usize,
    rounds: Mutex<ExchangedBlobs>,
    changed: Condvar,
    abandoned: AtomicBool,
}

impl ThreadExchange {
    pub fn new(size: usize) -> Arc<Self> {
        let abandoned = AtomicBool::new(false);
        Arc::new(Self { size, rounds: Mutex::default(), changed: Condvar::new(), abandoned })
    }

    /// The bootstrap of a rank.
    pub fn rank(self: &Arc<Self>, rank: usize) -> ThreadBootstrap {
        ThreadBootstrap { exchange: Arc::clone(self), rank, round: 0 }
    }

    /// A rank will not come: all waits fail.
    pub fn abandon(&self) {
        self.abandoned.store(true, Ordering::Relaxed);
        self.changed.notify_all();
    }
}

/// One rank's side of a [`ThreadExchange`].
#[derive(Debug)]
pub struct ThreadBootstrap {
    exchange: Arc<ThreadExchange>,
    rank: usize,
    round: usize,
}

impl Bootstrap for ThreadBootstrap {
    fn all_gather(&mut self, mine: &[u8]) -> Result<Vec<Vec<u8>>, Fault> {
        let (round, exchange) = (self.round, &self.exchange);
        self.round += 1;
        let mut rounds = lock(&exchange.rounds);
        if rounds.len() <= round {
            rounds.resize(round + 1, vec![None; exchange.size]);
        }
        rounds[round][self.rank] = Some(mine.to_vec());
        exchange.changed.notify_all();
        let deadline = Instant::now() + WAIT_MAX;
        while rounds[round].iter().any(Option::is_none) {
            if exchange.abandoned.load(Ordering::Relaxed) || Instant::now() > deadline {
                return Err(Fault::BadCall("another thread gave up before all ranks were connected".into()));
            }
            rounds = wait_timeout(&exchange.changed, rounds, POLL_INTERVAL);
        }
        Ok(rounds[round].iter().flatten().cloned().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_gather_in_rank_order_and_do_not_wait_for_one_that_gave_up() {
        let exchange = ThreadExchange::new(3);
        std::thread::scope(|scope| {
            for rank in 0..3u8 {
                let mut bootstrap = exchange.rank(usize::from(rank));
                scope.spawn(move || {
                    for round in 0..2 {
                        let all = bootstrap.all_gather(&[rank, round]).unwrap();
                        assert_eq!(all, [[0, round], [1, round], [2, round]]);
                    }
                });
            }
        });
        exchange.abandon();
        assert!(exchange.rank(0).all_gather(&[9]).is_ok(), "the first round is complete");
        let exchange = ThreadExchange::new(2);
        exchange.abandon();
        assert!(exchange.rank(0).all_gather(&[9]).is_err());
    }
}
