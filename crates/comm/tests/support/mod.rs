//! How the ranks of a test find each other: through a folder for processes, through a table for threads.

use kolo_comm::{Bootstrap, Fault};
use std::path::{Path, PathBuf};
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
        let deadline = Instant::now() + Duration::from_secs(20);
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
