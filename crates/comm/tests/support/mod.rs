//! How the ranks of a test find each other: through a folder for processes, through a table for threads.

#![allow(dead_code, reason = "each user needs a part")]

use kolo_comm::{Bootstrap, Fault};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

/// Each rank writes its bytes into a file of a folder and waits for those of the others.
#[derive(Debug)]
pub struct Folder {
    folder: PathBuf,
    rank: usize,
    size: usize,
    round: usize,
}

impl Folder {
    pub fn new(folder: &Path, rank: usize, size: usize) -> Self {
        Self { folder: folder.into(), rank, size, round: 0 }
    }
}

impl Bootstrap for Folder {
    fn all_gather(&mut self, mine: &[u8]) -> Result<Vec<Vec<u8>>, Fault> {
        let path = |rank: usize| self.folder.join(format!("{}-{rank}", self.round));
        let failed = |error: std::io::Error| Fault::system("the test's folder", &error);
        let draft = self.folder.join(format!("draft-{}", self.rank));
        std::fs::write(&draft, mine).map_err(failed)?;
        std::fs::rename(draft, path(self.rank)).map_err(failed)?;
        let deadline = Instant::now() + Duration::from_secs(60);
        let read = |rank: usize| loop {
            match std::fs::read(path(rank)) {
                Ok(bytes) => return Ok(bytes),
                Err(error) if Instant::now() > deadline => return Err(failed(error)),
                Err(_) => std::thread::sleep(Duration::from_millis(1)),
            }
        };
        let all = (0..self.size).map(read).collect();
        self.round += 1;
        all
    }
}

/// What the ranks have laid on the table, by round and rank.
type Laid = Vec<Vec<Option<Vec<u8>>>>;

/// The ranks are threads: each puts its bytes on a table and waits until it is laid for all.
#[derive(Debug)]
pub struct Table {
    rank: usize,
    round: usize,
    laid: Arc<(Mutex<Laid>, Condvar)>,
}

impl Table {
    pub fn for_ranks(size: usize) -> Vec<Self> {
        let laid = Arc::new((Mutex::new(vec![vec![None; size]; 4]), Condvar::new()));
        (0..size).map(|rank| Self { rank, round: 0, laid: Arc::clone(&laid) }).collect()
    }
}

impl Bootstrap for Table {
    fn all_gather(&mut self, mine: &[u8]) -> Result<Vec<Vec<u8>>, Fault> {
        let (table, changed) = &*self.laid;
        let mut rounds = table.lock().expect("no panic");
        rounds[self.round][self.rank] = Some(mine.to_vec());
        changed.notify_all();
        let rounds = changed.wait_while(rounds, |rounds| rounds[self.round].iter().any(Option::is_none));
        let all = rounds.expect("no panic")[self.round].iter().flatten().cloned().collect();
        self.round += 1;
        Ok(all)
    }
}
