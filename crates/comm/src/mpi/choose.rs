//! Which MPI library to open: the one of the launcher that started us. Any other would make every rank a world of its own.
//!
//! Pure: the environment comes as a function, the file system is not asked.

use super::abi::MpiFamily;
use crate::host::EnvLookup;
use std::path::{Path, PathBuf};

/// What may have started this process, as far as MPI is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MpiLauncher {
    /// Its own variables are only set by its own launcher, for the ranks themselves.
    OpenMpi,
    /// The simple process manager interface: MPICH's Hydra and its relatives, or `srun --mpi=pmi2`.
    Pmi,
    /// The interface of Open MPI's launcher and of `srun --mpi=pmix`, which some builds of MPICH speak too.
    Pmix,
    /// `srun` without an interface for MPI.
    Slurm,
    Nobody,
}

/// The launcher and what it says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Launch {
    launcher: MpiLauncher,
    /// Ranks it says it started.
    pub ranks: Option<usize>,
    /// Traces of a second launcher around the first.
    both: bool,
}

/// Sonames, the likeliest first. `libmpi.so.12` is what MPICH's relatives agreed on; Debian calls MPICH's own otherwise.
const OPEN_MPI: [&str; 1] = ["libmpi.so.40"];
const MPICH: [&str; 2] = ["libmpich.so.12", "libmpi.so.12"];
const STANDARD: [&str; 2] = ["libmpi_abi.so.1", "libmpi_abi.so.0"];
/// Where sites and vendors say an MPI is installed.
const PREFIXES: [&str; 5] = ["OPAL_PREFIX", "MPI_HOME", "MPI_ROOT", "I_MPI_ROOT", "CRAY_MPICH_DIR"];
const SRUN_HINT: &str =
    "start with srun --mpi=pmi2 or --mpi=pmix (srun --mpi=list shows what there is), or use another transport than MPI";
const FOLDERS: [&str; 2] = ["lib", "lib/release"];

impl Launch {
    /// Open MPI's variables come first: its launcher may run inside a step of Slurm, whose own are then inherited.
    pub fn detect(env: EnvLookup<'_>) -> Self {
        let number = |name: &str| env(name).and_then(|text| text.trim().parse().ok());
        let is_set = |name: &str| env(name).is_some();
        let open_mpi = is_set("OMPI_COMM_WORLD_RANK");
        let pmi = ["PMI_RANK", "PMI_FD", "PMI_PORT", "PMI_CONTROL_PORT"].into_iter().any(is_set);
        let (launcher, ranks) = if open_mpi {
            (MpiLauncher::OpenMpi, number("OMPI_COMM_WORLD_SIZE"))
        } else if pmi {
            (MpiLauncher::Pmi, number("PMI_SIZE"))
        } else if is_set("PMIX_RANK") {
            (MpiLauncher::Pmix, number("SLURM_STEP_NUM_TASKS"))
        } else if is_set("SLURM_STEP_NUM_TASKS") && is_set("SLURM_PROCID") {
            (MpiLauncher::Slurm, number("SLURM_STEP_NUM_TASKS"))
        } else {
            (MpiLauncher::Nobody, None)
        };
        Self { launcher, ranks, both: open_mpi && pmi }
    }

    /// Libraries to try, in order. One that the user names is the only one.
    pub fn candidates(&self, env: EnvLookup<'_>, named: Option<&Path>) -> Vec<PathBuf> {
        if let Some(path) = named {
            return vec![path.into()];
        }
        let names: Vec<&str> = match self.launcher {
            MpiLauncher::Pmi => MPICH.iter().chain(&STANDARD).chain(&OPEN_MPI).copied().collect(),
            MpiLauncher::OpenMpi => OPEN_MPI.iter().chain(&STANDARD).copied().collect(),
            _ => OPEN_MPI.iter().chain(&MPICH).chain(&STANDARD).copied().collect(),
        };
        let prefixes: Vec<String> = PREFIXES.iter().filter_map(|name| env(name)).filter(|p| !p.is_empty()).collect();
        let below = |name: &&str| {
            let at = |prefix: &String| FOLDERS.map(|folder| Path::new(prefix).join(folder).join(name));
            prefixes.iter().flat_map(at).collect::<Vec<_>>()
        };
        let mut paths: Vec<PathBuf> = names.iter().flat_map(below).collect();
        paths.extend(names.iter().map(PathBuf::from));
        paths
    }

    /// Why no library could work, known before one is opened: Open MPI would end the process in such a place. Intel's
    /// relatives of MPICH can be told to speak with Slurm by themselves, and a library that the user names may, too.
    pub fn unsupported(&self, env: EnvLookup<'_>, named: Option<&Path>) -> Option<String> {
        let ranks = self.ranks.filter(|ranks| *ranks > 1 && self.launcher == MpiLauncher::Slurm)?;
        let free = named.is_none() && env("I_MPI_PMI_LIBRARY").is_none();
        free.then(|| {
            format!("{} started {ranks} ranks, which MPI cannot connect\n  hint: {SRUN_HINT}", self.describe())
        })
    }

    pub fn describe(&self) -> &'static str {
        match (self.launcher, self.both) {
            (MpiLauncher::OpenMpi, true) => "Open MPI's mpirun (inside a launcher that speaks PMI)",
            (MpiLauncher::OpenMpi, false) => "Open MPI's mpirun",
            (MpiLauncher::Pmi, _) => "a launcher that speaks PMI (MPICH's mpirun, or srun --mpi=pmi2)",
            (MpiLauncher::Pmix, _) => "a launcher that speaks PMIx (such as srun --mpi=pmix)",
            (MpiLauncher::Slurm, _) => "srun without an interface for MPI (--mpi=none)",
            (MpiLauncher::Nobody, _) => "no launcher",
        }
    }

    /// Why a library that started with another number of ranks than the launcher is of no use, and what would be.
    /// `library` is its name and version.
    pub fn mismatch(&self, size: usize, library: &str, family: MpiFamily) -> Option<String> {
        let ranks = self.ranks.filter(|ranks| *ranks != size)?;
        let hint = match (self.launcher, family) {
            (MpiLauncher::Slurm, _) => SRUN_HINT,
            (MpiLauncher::OpenMpi, MpiFamily::OpenMpi) => {
                "this Open MPI and the mpirun in use are two installations; name the library of that mpirun with \
                 --mpi-library PATH"
            }
            (MpiLauncher::OpenMpi, _) => {
                "start with the mpirun that belongs to this library, or name Open MPI's library with --mpi-library PATH"
            }
            (_, MpiFamily::OpenMpi) => {
                "start with Open MPI's own mpirun (mpirun.openmpi), or name the library of the launcher in use \
                 (for MPICH libmpich.so.12 or libmpi.so.12) with --mpi-library PATH"
            }
            _ => "name the library that belongs to the launcher in use with --mpi-library PATH",
        };
        let world = if size == 1 { "is alone in its MPI world".into() } else { format!("sees {size} ranks") };
        Some(format!(
            "this process {world}, but {} started {ranks} ranks: the library loaded, {library}, does not belong \
             to that launcher\n  hint: {hint}",
            self.describe(),
        ))
    }

    /// What to do when no library could be opened.
    pub fn missing(&self, tried: &[String]) -> String {
        let package = match self.launcher {
            MpiLauncher::OpenMpi => "Open MPI",
            MpiLauncher::Pmi => "MPICH",
            _ => "Open MPI or MPICH",
        };
        format!(
            "this process was started by {}, but no library of {package} can be loaded:\n    {}\n  hint: install it, put \
             its folder into LD_LIBRARY_PATH, or name the library with --mpi-library PATH",
            self.describe(),
            tried.join("\n    ")
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launch(variables: &[(&str, &str)]) -> (Launch, Vec<PathBuf>) {
        let env = |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| value.to_string());
        let launch = Launch::detect(&env);
        let candidates = launch.candidates(&env, None);
        (launch, candidates)
    }

    #[test]
    fn the_launcher_chooses_the_library() {
        let (open_mpi, libraries) =
            launch(&[("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "4"), ("PMIX_RANK", "0")]);
        assert_eq!((open_mpi.launcher, open_mpi.ranks), (MpiLauncher::OpenMpi, Some(4)));
        assert_eq!(libraries[0], Path::new("libmpi.so.40"));
        let (mpich, libraries) = launch(&[("PMI_RANK", "1"), ("PMI_SIZE", "2"), ("PMI_FD", "8")]);
        assert_eq!((mpich.launcher, mpich.ranks), (MpiLauncher::Pmi, Some(2)));
        assert_eq!(libraries[0], Path::new("libmpich.so.12"));
        let (slurm, _) = launch(&[("SLURM_PROCID", "1"), ("SLURM_STEP_NUM_TASKS", "3")]);
        assert_eq!((slurm.launcher, slurm.ranks), (MpiLauncher::Slurm, Some(3)));
        assert!(slurm.unsupported(&|_| None, None).is_some_and(|text| text.contains("srun --mpi=pmi2")));
        assert_eq!(slurm.unsupported(&|_| None, Some(Path::new("libmpi.so"))), None);
        assert_eq!(mpich.unsupported(&|_| None, None), None);
        let (nobody, libraries) = launch(&[]);
        assert_eq!((nobody.launcher, nobody.ranks), (MpiLauncher::Nobody, None));
        assert!(libraries.len() > 3);
        let (nested, _) = launch(&[("OMPI_COMM_WORLD_RANK", "0"), ("PMI_FD", "5"), ("PMI_SIZE", "9")]);
        assert_eq!((nested.launcher, nested.ranks, nested.both), (MpiLauncher::OpenMpi, None, true));
    }

    #[test]
    fn a_named_place_comes_first_and_a_named_library_alone() {
        let (launch, libraries) = launch(&[("PMI_RANK", "0"), ("I_MPI_ROOT", "/opt/intel")]);
        assert_eq!(libraries[0], Path::new("/opt/intel/lib/libmpich.so.12"));
        assert!(libraries.contains(&"/opt/intel/lib/release/libmpi.so.12".into()));
        let named = launch.candidates(&|_| None, Some(Path::new("/own/libmpi.so")));
        assert_eq!(named, [PathBuf::from("/own/libmpi.so")]);
    }

    #[test]
    fn lonely_ranks_are_explained() {
        let (launch, _) = launch(&[("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "4")]);
        assert_eq!(launch.mismatch(4, "libmpi.so.40", MpiFamily::OpenMpi), None);
        let text = launch.mismatch(1, "libmpich.so.12 (MPICH 4.0.2)", MpiFamily::Mpich).unwrap();
        for part in ["alone", "4 ranks", "libmpich.so.12 (MPICH 4.0.2)", "Open MPI's mpirun", "--mpi-library PATH"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}
