//! A store's values where a device keeps them. Whoever has written last is newer; the other side is brought up to date when it is
//! read, and not before.

use kolo_base::lock;
use std::any::Any;
use std::fmt::Debug;
use std::sync::{Arc, Mutex};

/// A copy of a store's memories on a device.
pub trait Mirror: Any + Debug + Send + Sync {
    /// Copies everything into the memories of the host. What fails is told by the device's next call.
    fn fetch(&self);
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Newest {
    #[default]
    Host,
    Both,
    Mirror,
}

#[derive(Debug, Default)]
struct Sides {
    mirror: Option<Arc<dyn Mirror>>,
    newest: Newest,
}

/// Which side of a store is the newest.
#[derive(Debug, Default)]
pub struct Mirrored(Mutex<Sides>);

impl Mirrored {
    /// The store's mirror; the first who asks makes it.
    pub fn get_or_make<E, M: Mirror>(&self, make: impl FnOnce() -> Result<Arc<M>, E>) -> Result<Arc<dyn Mirror>, E> {
        let mut sides = lock(&self.0);
        if let Some(mirror) = &sides.mirror {
            return Ok(Arc::clone(mirror));
        }
        let made: Arc<dyn Mirror> = make()?;
        sides.mirror = Some(Arc::clone(&made));
        Ok(made)
    }

    /// The store's mirror, if there is one.
    pub fn made(&self) -> Option<Arc<dyn Mirror>> {
        lock(&self.0).mirror.clone()
    }

    /// Brings the mirror up to date by `upload`, if the host is newer.
    pub fn read_mirror<E>(&self, upload: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
        let mut sides = lock(&self.0);
        if sides.newest == Newest::Host {
            upload()?;
            sides.newest = Newest::Both;
        }
        Ok(())
    }

    /// The mirror has changed.
    pub fn mirror_changed(&self) {
        lock(&self.0).newest = Newest::Mirror;
    }

    /// The host's memories are about to be read.
    pub fn read_host(&self) {
        let mut sides = lock(&self.0);
        if let (Newest::Mirror, Some(mirror)) = (sides.newest, &sides.mirror) {
            mirror.fetch();
            sides.newest = Newest::Both;
        }
    }

    /// The host's memories are about to be written.
    pub fn write_host(&self) {
        self.read_host();
        lock(&self.0).newest = Newest::Host;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[derive(Debug, Default)]
    struct Counts(AtomicUsize);

    impl Mirror for Counts {
        fn fetch(&self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn each_side_is_brought_up_to_date_once() {
        let mirrored = Mirrored::default();
        let mirror = Arc::new(Counts::default());
        mirrored.get_or_make(|| Ok::<_, ()>(Arc::clone(&mirror))).unwrap();
        let uploads = AtomicUsize::new(0);
        let upload = || {
            uploads.fetch_add(1, Ordering::Relaxed);
            Ok::<(), ()>(())
        };
        mirrored.read_host();
        mirrored.read_mirror(upload).unwrap();
        mirrored.read_mirror(upload).unwrap();
        let counts = || (uploads.load(Ordering::Relaxed), mirror.0.load(Ordering::Relaxed));
        assert_eq!(counts(), (1, 0));
        mirrored.mirror_changed();
        mirrored.read_host();
        mirrored.read_host();
        assert_eq!(counts(), (1, 1));
        mirrored.mirror_changed();
        mirrored.write_host();
        mirrored.read_mirror(upload).unwrap();
        assert_eq!(counts(), (2, 2));
        let failed: Result<(), &str> = {
            mirrored.write_host();
            mirrored.read_mirror(|| Err("no device"))
        };
        assert_eq!(failed, Err("no device"));
        mirrored.read_mirror(upload).unwrap();
        assert_eq!(counts(), (3, 2), "what failed is tried again");
    }
}
