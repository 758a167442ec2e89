//! The descriptions that are part of the program: clusters by name, and the published results with all files that their rows name.

use crate::output::println;
use kolo_plan::cluster::Cluster;
use kolo_plan::device::DeviceTable;

/// A file that the program carries.
#[derive(Clone, Copy, Debug)]
pub struct BuiltIn {
    /// Without `.toml`.
    pub name: &'static str,
    pub text: &'static str,
}

macro_rules! files {
    ($folder:literal: $($name:literal)*) => {
        &[$(BuiltIn { name: $name, text: include_str!(concat!("../../../", $folder, "/", $name, ".toml")) }),*]
    };
}

/// All of bench/published.
pub const PUBLISHED: &[BuiltIn] = files! { "bench/published":
    "bert" "dgx-a100-f16" "dgx-a100-tf32" "dgx1-p100" "dgx1-v100-f16" "dgx1-v100-f32" "dgx2-bert-f16"
    "dgx2-bert-f32" "dgx2-v100-f32" "dgx2h-megatron" "fsdp-a100" "gpt" "horovod-tcp" "horovod" "ibm-a100"
    "ibm-h100" "images" "jean-zay" "lambda-v100-f32" "llama" "llama405" "llama70" "megatron-h100" "meta-h100"
    "metaseq" "mosaic-a100-40" "mosaic-a100-pure" "mosaic-a100" "mosaic-h100" "mpt" "mxnet-dgx-a100-f16"
    "mxnet-dgx1-v100-f16" "mxnet-dgx2-v100-f16" "nemo-h100-f8" "neox-a100-40" "rows" "selene-deepspeed"
    "selene-mt-nlg" "selene" "tf-dgx-a100-40-f16" "tf-dgx-a100-40-tf32" "tf-dgx1-v100-f16" "tf-dgx1-v100-f32"
    "tinyllama" "torchtitan-a100" "torchtitan-eager" "torchtitan-float8-async" "torchtitan-float8-tp"
    "torchtitan-float8" "torchtitan-h200" "torchtitan"
};
/// What `examples/clusters` has beside.
const EXAMPLES: &[BuiltIn] = files! { "examples/clusters": "h100" };

/// Whether a text describes a cluster: it says of which device.
fn is_cluster(file: &&BuiltIn) -> bool {
    file.text.lines().any(|line| line.starts_with("device ="))
}

/// Clusters that `--cluster` knows by name.
pub fn all() -> impl Iterator<Item = &'static BuiltIn> {
    EXAMPLES.iter().chain(PUBLISHED).filter(is_cluster)
}

pub fn named(name: &str) -> Option<&'static BuiltIn> {
    all().find(|file| file.name == name)
}

/// Prints every cluster with its device, its size and what it is.
pub fn list() {
    let Ok(devices) = DeviceTable::built_in() else { return };
    for file in all() {
        let root = kolo_config::parse(file.text, file.name);
        if let Ok(cluster) = root.map_err(|_| ()).and_then(|root| Cluster::read(&root, &devices).map_err(|_| ())) {
            println!("{:<22} {:>6} × {:<10} {}", file.name, cluster.devices(), cluster.device.name, cluster.name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_published_file_is_carried_and_every_cluster_is_valid() {
        let folder = format!("{}/../../bench/published", env!("CARGO_MANIFEST_DIR"));
        let mut files: Vec<String> = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
            .collect();
        files.sort();
        let carried: Vec<String> = PUBLISHED.iter().map(|file| format!("{}.toml", file.name)).collect();
        assert_eq!(carried, files);
        let devices = DeviceTable::built_in().unwrap();
        for file in all() {
            Cluster::read(&kolo_config::parse(file.text, file.name).unwrap(), &devices).unwrap();
        }
        assert!(named("selene").is_some() && named("gpt").is_none());
    }
}
