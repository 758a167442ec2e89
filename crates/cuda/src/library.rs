//! Libraries that are opened while the program runs, and tables of the functions that we call in them.
//!
//! A library that is missing, or too old to have a function, is an error that says which one, what needs it and how to get
//! it. Nothing here panics, and nothing is loaded before somebody asks.

use crate::error::CudaError;
use std::ffi::{CStr, CString};
use std::path::{Path, PathBuf};

/// What we know of a library before it is opened.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LibraryName {
    /// As messages call it.
    pub title: &'static str,
    /// File names to try, the newest first.
    pub files: &'static [&'static str],
    /// Folders of NVIDIA's Python packages that hold it, below `nvidia/`.
    pub wheels: &'static [&'static str],
    pub needed_for: &'static str,
    pub hint: &'static str,
}

/// An open library. It stays open for the life of the process: its threads and handlers would outlive its code.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Library {
    handle: *mut libc::c_void,
    name: LibraryName,
}

// SAFETY: a handle of the dynamic linker, which may be used from any thread.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

impl Library {
    pub fn open(name: LibraryName) -> Result<Self, CudaError> {
        let mut first = None;
        for path in candidates(&name) {
            match dlopen(&path) {
                Ok(handle) => return Ok(Self { handle, name }),
                // A file that is there and cannot be opened tells more than one that is not there.
                Err(reason) => {
                    if first.is_none() || path.is_absolute() && path.exists() {
                        first = Some(reason);
                    }
                }
            }
        }
        let LibraryName { title, needed_for, hint, files, .. } = name;
        let reason = first.unwrap_or_else(|| format!("there is no {}", files[0]));
        Err(CudaError::MissingLibrary { title, needed_for, reason, hint })
    }

    /// The address of a function.
    pub fn symbol(&self, symbol: &'static str) -> Result<usize, CudaError> {
        let text = CString::new(symbol).unwrap_or_default();
        // SAFETY: the handle is open and the name ends in a zero.
        let address = unsafe { libc::dlsym(self.handle, text.as_ptr()) };
        if address.is_null() {
            let LibraryName { title, needed_for, hint, .. } = self.name;
            return Err(CudaError::MissingFunction { symbol, title, needed_for, hint });
        }
        Ok(address as usize)
    }
}

fn dlopen(path: &Path) -> Result<*mut libc::c_void, String> {
    let text = CString::new(path.as_os_str().as_encoded_bytes()).map_err(|_| "a zero byte in a path".to_string())?;
    // SAFETY: runs the library's initialisers, as linking it would.
    let handle = unsafe { libc::dlopen(text.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if !handle.is_null() {
        return Ok(handle);
    }
    // SAFETY: the linker's last message, which lives until its next call on this thread.
    let message = unsafe { libc::dlerror() };
    if message.is_null() {
        return Err(format!("{} cannot be opened", path.display()));
    }
    // SAFETY: as above; it ends in a zero.
    Err(unsafe { CStr::from_ptr(message) }.to_string_lossy().into_owned())
}

/// Where a library may be: wherever the linker looks, then in a toolkit, then in NVIDIA's Python packages.
fn candidates(name: &LibraryName) -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> = name.files.iter().map(PathBuf::from).collect();
    let toolkits = ["CUDA_HOME", "CUDA_PATH"].iter().filter_map(std::env::var_os).map(PathBuf::from);
    for toolkit in toolkits.chain([PathBuf::from("/usr/local/cuda")]) {
        paths.extend(name.files.iter().map(|file| toolkit.join("lib64").join(file)));
    }
    if let Some(environment) = std::env::var_os("VIRTUAL_ENV").map(PathBuf::from) {
        let versions = std::fs::read_dir(environment.join("lib")).into_iter().flatten().flatten();
        let mut versions: Vec<PathBuf> = versions.map(|entry| entry.path()).collect();
        versions.sort();
        for packages in versions.iter().map(|version| version.join("site-packages/nvidia")) {
            for wheel in name.wheels {
                paths.extend(name.files.iter().map(|file| packages.join(wheel).join("lib").join(file)));
            }
        }
    }
    paths
}

/// Declares a table of functions of a library.
macro_rules! functions {
    ($(#[$attribute:meta])* $table:ident: $($name:ident = $symbol:literal ($($ty:ty),* $(,)?);)+) => {
        $(#[$attribute])*
        pub(crate) struct $table {
            $(pub $name: unsafe extern "C" fn($($ty),*) -> std::ffi::c_int,)+
        }

        impl $table {
            pub fn load(library: &$crate::library::Library) -> Result<Self, $crate::error::CudaError> {
                Ok(Self {$(
                    // SAFETY: the function of this name has this signature in the library's public interface.
                    $name: unsafe {
                        std::mem::transmute::<usize, unsafe extern "C" fn($($ty),*) -> std::ffi::c_int>(
                            library.symbol($symbol)?
                        )
                    },
                )+})
            }
        }

        impl std::fmt::Debug for $table {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(stringify!($table))
            }
        }
    };
}
pub(crate) use functions;

#[cfg(test)]
mod tests {
    use super::*;

    const NAME: LibraryName = LibraryName {
        title: "libnothing",
        files: &["libkolo_nothing.so.9"],
        wheels: &[],
        needed_for: "a test",
        hint: "install libnothing",
    };

    #[test]
    fn what_is_missing_is_named() {
        let error = Library::open(NAME).unwrap_err().to_string();
        assert!(error.contains("libnothing") && error.contains("libkolo_nothing.so.9"), "{error}");
        assert!(error.contains("a test") && error.contains("hint: install libnothing"), "{error}");
        let c = Library::open(LibraryName { files: &["libc.so.6"], title: "the C library", ..NAME }).unwrap();
        assert!(c.symbol("malloc").is_ok());
        let error = c.symbol("kolo_nothing").unwrap_err().to_string();
        assert!(error.contains("the C library") && error.contains("`kolo_nothing`"), "{error}");
    }
}
