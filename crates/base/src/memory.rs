//! How much memory a process may take, as far as the system tells.

use std::path::{Path, PathBuf};

/// The smallest limit of the control groups that this process is in, and the file that sets it.
pub fn group_limit() -> Option<(u64, PathBuf)> {
    let groups = group_files(&std::fs::read_to_string("/proc/self/cgroup").ok()?);
    let limit = |path: PathBuf| Some((std::fs::read_to_string(&path).ok()?.trim().parse().ok()?, path));
    // Of equal ones that of the outermost, which the most processes share.
    groups.into_iter().filter_map(limit).min_by_key(|(bytes, path)| (*bytes, path.components().count()))
}

/// The files that may hold limits of this process's control groups and of those around them, from `/proc/self/cgroup`.
fn group_files(text: &str) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for line in text.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let (root, file) = match controllers {
            "" => ("/sys/fs/cgroup", "memory.max"),
            list if list.split(',').any(|name| name == "memory") => ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
            _ => continue,
        };
        for around in Path::new(path).ancestors() {
            files.push(Path::new(root).join(around.strip_prefix("/").unwrap_or(around)).join(file));
        }
    }
    files
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_and_those_around_them_have_limits() {
        let files = |text: &str| group_files(text).iter().map(|path| path.display().to_string()).collect::<Vec<_>>();
        assert_eq!(
            files("0::/a/b\n"),
            ["/sys/fs/cgroup/a/b/memory.max", "/sys/fs/cgroup/a/memory.max", "/sys/fs/cgroup/memory.max"]
        );
        assert_eq!(files("5:cpu,cpuacct:/x\n4:memory:/\n"), ["/sys/fs/cgroup/memory/memory.limit_in_bytes"]);
    }
}
