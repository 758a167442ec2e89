//! A disk in memory whose power can fail at any operation, for tests.
//!
//! It keeps what the [`Disk`] trait promises and nothing more. When the power fails, of what was not synced any part may be
//! there afterwards: writes and names independently of each other and of their order, a write also cut in the middle.

use crate::disk::{Disk, Item, ReadFile, SharedDisk, WriteFile};
use kolo_base::lock;
use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::path::{Component, Path};
use std::sync::{Arc, Mutex, MutexGuard};

/// What happens at an operation, counted from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    None,
    /// The power fails during it. Everything after fails.
    Cut {
        at: u64,
    },
    /// It fails, and nothing after it.
    Once {
        at: u64,
        kind: ErrorKind,
    },
    /// Everything that changes the disk fails from it on.
    ReadOnly {
        from: u64,
    },
    /// There is room for so many bytes in files.
    Full {
        bytes: u64,
    },
}

/// What became of something that was not synced when the power failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    Lost,
    Kept,
    /// Of a write, so many 256ths of it; a name is kept.
    Torn(u8),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Node {
    File(usize),
    Dir(usize),
}

#[derive(Clone, Debug)]
enum DataChange {
    Emptied,
    Written { offset: usize, bytes: Vec<u8> },
}

#[derive(Clone, Debug)]
enum NameChange {
    Added(String, Node),
    Removed(String),
    Renamed { from: String, to: String, node: Node },
}

#[derive(Clone, Debug, Default)]
struct FileNode {
    now: Vec<u8>,
    durable: Vec<u8>,
    pending: Vec<DataChange>,
}

#[derive(Clone, Debug, Default)]
struct DirNode {
    now: BTreeMap<String, Node>,
    durable: BTreeMap<String, Node>,
    pending: Vec<NameChange>,
}

#[derive(Clone, Debug)]
struct DiskState {
    files: Vec<FileNode>,
    dirs: Vec<DirNode>,
    operations: u64,
    trouble: Trouble,
    is_off: bool,
}

/// A disk in memory.
#[derive(Clone, Debug)]
pub struct SimulatedDisk {
    state: Arc<Mutex<DiskState>>,
}

impl Default for SimulatedDisk {
    fn default() -> Self {
        Self::new()
    }
}

/// How an operation that may begin ends.
enum Begun {
    /// As it should.
    Well,
    /// The power failed while it ran.
    Off,
}

impl SimulatedDisk {
    /// An empty disk, with a root directory.
    pub fn new() -> Self {
        Self::of(DiskState {
            files: Vec::new(),
            dirs: vec![DirNode::default()],
            operations: 0,
            trouble: Trouble::None,
            is_off: false,
        })
    }

    fn of(state: DiskState) -> Self {
        Self { state: Arc::new(Mutex::new(state)) }
    }

    pub fn shared(&self) -> SharedDisk {
        Arc::new(self.clone())
    }

    /// Another disk with the same contents.
    pub fn copy(&self) -> Self {
        Self::of(lock(&self.state).clone())
    }

    /// What will happen; operations are counted from here.
    pub fn set_trouble(&self, trouble: Trouble) {
        let mut state = lock(&self.state);
        (state.trouble, state.operations) = (trouble, 0);
    }

    /// Operations since then.
    pub fn operations(&self) -> u64 {
        lock(&self.state).operations
    }

    /// The disk after the power failed and came back: what was synced, and of the rest whatever `fate` says.
    pub fn after_power_failure(&self, fate: &mut dyn FnMut() -> Fate) -> Self {
        let mut state = lock(&self.state).clone();
        for file in &mut state.files {
            let mut data = std::mem::take(&mut file.durable);
            file.pending.drain(..).for_each(|change| change.apply(&mut data, fate()));
            (file.now, file.durable) = (data.clone(), data);
        }
        for dir in &mut state.dirs {
            let mut names = std::mem::take(&mut dir.durable);
            dir.pending.drain(..).filter(|_| fate() != Fate::Lost).for_each(|change| change.apply(&mut names));
            (dir.now, dir.durable) = (names.clone(), names);
        }
        (state.operations, state.trouble, state.is_off) = (0, Trouble::None, false);
        Self::of(state)
    }

    /// Changes one bit of a file, as time does.
    pub fn flip(&self, path: &Path, byte: usize, bit: u32) -> io::Result<()> {
        let mut state = lock(&self.state);
        let file = state.file(path)?;
        let file = &mut state.files[file];
        let old = *file.now.get(byte).ok_or(ErrorKind::UnexpectedEof)?;
        file.now[byte] = old ^ (1 << bit);
        Ok(())
    }

    /// Replaces the contents of a file.
    pub fn set_contents(&self, path: &Path, bytes: Vec<u8>) -> io::Result<()> {
        let mut state = lock(&self.state);
        let file = state.file(path)?;
        (state.files[file].now, state.files[file].durable) = (bytes.clone(), bytes);
        Ok(())
    }

    pub fn contents(&self, path: &Path) -> io::Result<Vec<u8>> {
        let state = lock(&self.state);
        Ok(state.files[state.file(path)?].now.clone())
    }

    /// Counts an operation that changes the disk, or not, and fails as the trouble says.
    fn begin(&self, changes: bool) -> io::Result<(MutexGuard<'_, DiskState>, Begun)> {
        let mut state = lock(&self.state);
        if state.is_off {
            return Err(power_failed());
        }
        let at = state.operations;
        state.operations += 1;
        match state.trouble {
            Trouble::Cut { at: cut } if cut == at => {
                state.is_off = true;
                Ok((state, Begun::Off))
            }
            Trouble::Once { at: fails, kind } if fails == at => Err(kind.into()),
            Trouble::ReadOnly { from } if changes && at >= from => Err(ErrorKind::ReadOnlyFilesystem.into()),
            _ => Ok((state, Begun::Well)),
        }
    }

    /// An operation that changes the names in the directory of `path`.
    fn change_name(
        &self,
        path: &Path,
        change: impl FnOnce(&mut DiskState, usize, String) -> io::Result<NameChange>,
    ) -> io::Result<()> {
        let (mut state, begun) = self.begin(true)?;
        let (dir, name) = state.parent(path)?;
        let change = change(&mut state, dir, name)?;
        change.clone().apply(&mut state.dirs[dir].now);
        state.dirs[dir].pending.push(change);
        begun.end()
    }
}

impl Begun {
    fn end(self) -> io::Result<()> {
        match self {
            Begun::Well => Ok(()),
            Begun::Off => Err(power_failed()),
        }
    }
}

fn power_failed() -> io::Error {
    io::Error::other("the power failed")
}

impl DataChange {
    fn apply(self, data: &mut Vec<u8>, fate: Fate) {
        match (self, fate) {
            (_, Fate::Lost) => {}
            (Self::Emptied, _) => data.clear(),
            (Self::Written { offset, mut bytes }, fate) => {
                if let Fate::Torn(part) = fate {
                    bytes.truncate(bytes.len() * usize::from(part) / 256);
                }
                let end = offset + bytes.len();
                data.resize(data.len().max(end), 0);
                data[offset..end].copy_from_slice(&bytes);
            }
        }
    }
}

impl NameChange {
    fn apply(self, names: &mut BTreeMap<String, Node>) {
        match self {
            Self::Added(name, node) => _ = names.insert(name, node),
            Self::Removed(name) => _ = names.remove(&name),
            Self::Renamed { from, to, node } => {
                if names.get(&from) == Some(&node) {
                    names.remove(&from);
                }
                names.insert(to, node);
            }
        }
    }
}

impl DiskState {
    fn node(&self, path: &Path) -> io::Result<Node> {
        let mut node = Node::Dir(0);
        for part in path.components() {
            let Component::Normal(name) = part else { continue };
            let Node::Dir(dir) = node else { return Err(ErrorKind::NotADirectory.into()) };
            let name = name.to_string_lossy();
            node = *self.dirs[dir].now.get(name.as_ref()).ok_or(ErrorKind::NotFound)?;
        }
        Ok(node)
    }

    fn dir(&self, path: &Path) -> io::Result<usize> {
        match self.node(path)? {
            Node::Dir(dir) => Ok(dir),
            Node::File(_) => Err(ErrorKind::NotADirectory.into()),
        }
    }

    fn file(&self, path: &Path) -> io::Result<usize> {
        match self.node(path)? {
            Node::File(file) => Ok(file),
            Node::Dir(_) => Err(ErrorKind::IsADirectory.into()),
        }
    }

    /// The directory that a path is in, and its name there.
    fn parent(&self, path: &Path) -> io::Result<(usize, String)> {
        let name = path.file_name().ok_or(ErrorKind::InvalidInput)?.to_string_lossy().into_owned();
        Ok((self.dir(path.parent().unwrap_or(Path::new("")))?, name))
    }
}

impl Disk for SimulatedDisk {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.change_name(path, |state, dir, name| {
            if state.dirs[dir].now.contains_key(&name) {
                return Err(ErrorKind::AlreadyExists.into());
            }
            state.dirs.push(DirNode::default());
            Ok(NameChange::Added(name, Node::Dir(state.dirs.len() - 1)))
        })
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn WriteFile>> {
        let open = |file| Box::new(SimulatedFile { disk: self.clone(), file });
        let existing = lock(&self.state).file(path);
        if let Ok(file) = existing {
            let (mut state, begun) = self.begin(true)?;
            state.files[file].now.clear();
            state.files[file].pending.push(DataChange::Emptied);
            return begun.end().map(|()| open(file) as _);
        }
        let mut made = 0;
        self.change_name(path, |state, _, name| {
            state.files.push(FileNode::default());
            made = state.files.len() - 1;
            Ok(NameChange::Added(name, Node::File(made)))
        })?;
        Ok(open(made))
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn ReadFile>> {
        let (state, begun) = self.begin(false)?;
        let file = state.file(path)?;
        let bytes = state.files[file].now.len() as u64;
        begun.end()?;
        Ok(Box::new(SimulatedReader { disk: self.clone(), file, bytes }))
    }

    fn list(&self, path: &Path) -> io::Result<Vec<Item>> {
        let (state, begun) = self.begin(false)?;
        let dir = state.dir(path)?;
        let item = |(name, node): (&String, &Node)| Item { name: name.clone(), is_dir: matches!(node, Node::Dir(_)) };
        let items = state.dirs[dir].now.iter().map(item).collect();
        begun.end().map(|()| items)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.change_name(from, |state, dir, from| {
            let (target, to) = state.parent(to)?;
            let node = *state.dirs[dir].now.get(&from).ok_or(ErrorKind::NotFound)?;
            let is_dir = |node: &Node| matches!(node, Node::Dir(_));
            let replaced = state.dirs[dir].now.get(&to);
            if target != dir || replaced.is_some_and(|old| is_dir(old) || is_dir(&node)) {
                return Err(ErrorKind::AlreadyExists.into());
            }
            Ok(NameChange::Renamed { from, to, node })
        })
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.change_name(path, |state, _, name| state.file(path).map(|_| NameChange::Removed(name)))
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        self.change_name(path, |state, _, name| match state.dirs[state.dir(path)?].now.is_empty() {
            true => Ok(NameChange::Removed(name)),
            false => Err(ErrorKind::DirectoryNotEmpty.into()),
        })
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        let (mut state, begun) = self.begin(true)?;
        let dir = state.dir(path)?;
        begun.end()?;
        let dir = &mut state.dirs[dir];
        dir.durable = dir.now.clone();
        dir.pending.clear();
        Ok(())
    }

    fn is_dir(&self, path: &Path) -> bool {
        lock(&self.state).dir(path).is_ok()
    }
}

#[derive(Debug)]
struct SimulatedFile {
    disk: SimulatedDisk,
    file: usize,
}

impl WriteFile for SimulatedFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let (mut state, begun) = self.disk.begin(true)?;
        let used: usize = state.files.iter().map(|file| file.now.len()).sum();
        let free = match state.trouble {
            Trouble::Full { bytes } => (bytes as usize).saturating_sub(used),
            _ => usize::MAX,
        };
        let part = &bytes[..bytes.len().min(free)];
        let file = &mut state.files[self.file];
        let written = DataChange::Written { offset: file.now.len(), bytes: part.to_vec() };
        file.now.extend_from_slice(part);
        file.pending.push(written);
        if part.len() < bytes.len() { Err(ErrorKind::StorageFull.into()) } else { begun.end() }
    }

    fn sync(&mut self) -> io::Result<()> {
        let (mut state, begun) = self.disk.begin(true)?;
        begun.end()?;
        let file = &mut state.files[self.file];
        file.durable = file.now.clone();
        file.pending.clear();
        Ok(())
    }
}

#[derive(Debug)]
struct SimulatedReader {
    disk: SimulatedDisk,
    file: usize,
    bytes: u64,
}

impl ReadFile for SimulatedReader {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let (state, begun) = self.disk.begin(false)?;
        let start = usize::try_from(offset).map_err(|_| ErrorKind::UnexpectedEof)?;
        let data = &state.files[self.file].now;
        let bytes =
            start.checked_add(out.len()).and_then(|end| data.get(start..end)).ok_or(ErrorKind::UnexpectedEof)?;
        out.copy_from_slice(bytes);
        begun.end()
    }
}
