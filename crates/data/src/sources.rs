//! The sources, one file each.

pub mod addition;
pub mod digits;
pub mod playground;
pub mod synthetic;
pub mod waves;
