//! Keys that other libraries and launchers have, and what a job file says instead.

use crate::error::Error;
use kolo_graph::settings::SettingError;

/// Names of one thing elsewhere.
struct ForeignKey {
    names: &'static [&'static str],
    /// The key of a job file, or the flag.
    here: &'static str,
    /// How to write it, and what differs.
    how: &'static str,
}

const fn key(names: &'static [&'static str], here: &'static str, how: &'static str) -> ForeignKey {
    ForeignKey { names, here, how }
}

/// Names are compared without regard to capitals, `-` and `_`.
const FOREIGN_KEYS: &[ForeignKey] = &[
    key(
        &[
            "accumulate",
            "accumulation",
            "accumulation_steps",
            "accum_steps",
            "accumulate_grad_batches",
            "grad_accum",
            "gradient_accumulation",
            "gradient_accumulation_steps",
            "grad_accumulation_steps",
            "micro_batch",
            "micro_batches",
            "micro_batch_size",
            "num_micro_batches",
            "per_device_batch_size",
            "per_device_train_batch_size",
        ],
        "data.grains",
        "`data.batch` is the whole batch of an update; it is computed in `data.grains` parts, one after the other, whose \
         gradients are added. More grains take less memory",
    ),
    key(
        &["lr", "learning_rate", "base_lr", "initial_lr", "eta"],
        "train.optimizer.lr",
        "write `optimizer = { kind = \"adamw\", lr = 1e-3 }` under [train]",
    ),
    key(
        &["weight_decay", "wd", "l2"],
        "train.optimizer.weight_decay",
        "write `optimizer = { kind = \"adamw\", weight_decay = 0.01 }` under [train]",
    ),
    key(
        &["momentum"],
        "train.optimizer.momentum",
        "write `optimizer = { kind = \"sgd\", momentum = 0.9 }` under [train]",
    ),
    key(
        &["betas", "beta1", "beta2"],
        "train.optimizer.beta1",
        "`beta1` and `beta2` are keys of `optimizer` under [train]",
    ),
    key(
        &["opt", "optim", "optimiser", "optimizer"],
        "train.optimizer",
        "write `optimizer = { kind = \"adamw\" }` under [train]",
    ),
    key(
        &["scheduler", "schedule", "lr_scheduler", "lr_schedule", "lr_scheduler_type"],
        "train.schedule",
        "write `schedule = { kind = \"cosine\" }` under [train]",
    ),
    key(
        &["warmup", "warmup_steps", "warmup_ratio", "num_warmup_steps"],
        "train.schedule.warmup",
        "write `schedule = { kind = \"cosine\", warmup = 100 }` under [train]",
    ),
    key(
        &["batch", "batch_size", "bs", "mini_batch", "mini_batch_size", "train_batch_size", "global_batch_size"],
        "data.batch",
        "it is the batch of an update, over all workers",
    ),
    key(
        &["epochs", "num_epochs", "n_epochs", "max_epochs", "num_train_epochs"],
        "train.epochs",
        "write it under [train]",
    ),
    key(
        &["steps", "max_steps", "num_steps", "total_steps", "iterations", "max_iters", "num_iterations"],
        "train.steps",
        "write it under [train], instead of `epochs`",
    ),
    key(&["seed", "random_seed", "manual_seed", "random_state", "rng_seed"], "job.seed", "write it under [job]"),
    key(
        &[
            "clip",
            "grad_clip",
            "gradient_clip",
            "clip_grad",
            "clip_norm",
            "clip_grad_norm",
            "max_grad_norm",
            "gradient_clip_val",
        ],
        "train.clip",
        "it is the largest norm of the whole gradient",
    ),
    key(
        &["fp16", "bf16", "amp", "use_amp", "mixed_precision", "precision", "dtype", "half", "torch_dtype"],
        "train.precision",
        "write `precision = \"bf16\"` under [train]",
    ),
    key(
        &["loader_workers", "data_workers", "dataloader_workers", "dataloader_num_workers", "num_workers"],
        "data.threads",
        "loader threads of each worker; workers that share the training come from the flag `-n`",
    ),
    key(
        &["workers", "world_size", "nproc", "nproc_per_node", "num_processes", "gpus", "num_gpus", "n_gpu", "devices"],
        "-n",
        "the number of workers is no part of a job: `kolo train JOB.toml -n 4`",
    ),
    key(
        &["device", "accelerator", "cuda"],
        "--device",
        "the device is no part of a job: `kolo train JOB.toml --device cuda`",
    ),
    key(
        &["val_split", "validation_split", "val_size", "test_size", "val_fraction", "validation_fraction"],
        "data.holdout",
        "it is the fraction of the samples that is held out for evaluation",
    ),
    key(
        &["k_folds", "n_splits", "num_folds"],
        "data.folds",
        "`kolo train JOB.toml --folds 5` trains all folds; `folds = 5` and `fold = 0` under [data] train one",
    ),
    key(
        &["dataset", "dataset_path", "data_path", "data_dir", "train_data", "train_file", "path", "root"],
        "data.source",
        "it names files, a folder or a built-in source",
    ),
    key(&["shuffle_buffer_size", "buffer_size"], "data.shuffle_buffer", "it is for data that are read as a stream"),
    key(
        &["out", "output", "out_dir", "output_dir", "save_dir", "log_dir", "checkpoint_dir", "ckpt_dir"],
        "--out",
        "the directory of a run is no part of a job: `kolo train JOB.toml --out DIR`",
    ),
    key(
        &["resume", "resume_from", "resume_from_checkpoint"],
        "--resume",
        "go on with a run by `kolo train JOB.toml --out DIR --resume`",
    ),
    key(
        &["save_every", "save_steps", "save_interval", "save_freq", "checkpoint_every", "checkpoint_interval"],
        "checkpoint.every",
        "write `every = \"200 steps\"` under [checkpoint]",
    ),
    key(
        &["save_total_limit", "keep_last", "max_to_keep", "save_top_k"],
        "checkpoint.keep",
        "write it under [checkpoint]",
    ),
    key(
        &["eval_steps", "eval_interval", "evaluate_every", "eval_frequency", "val_check_interval", "eval_strategy"],
        "train.eval_every",
        "write a number of epochs, or `eval_every = \"100 steps\"`, under [train]",
    ),
    key(
        &["log_interval", "logging_steps", "log_steps", "print_every", "print_freq"],
        "train.log_every",
        "write it under [train]",
    ),
    key(
        &["early_stop", "early_stopping", "early_stopping_patience", "patience"],
        "train.early_stop",
        "write `early_stop = { metric = \"loss\", patience = 3 }` under [train]",
    ),
    key(
        &["gradient_checkpointing", "activation_checkpointing", "use_checkpointing"],
        "memory.recompute",
        "write `recompute = \"blocks\"` under [memory]",
    ),
    key(
        &["fsdp", "zero_stage", "zero_optimization", "sharding_strategy", "sharded_ddp"],
        "parallel.zero",
        "write 1, 2 or 3 under [parallel]",
    ),
    key(&["tp", "tensor_parallel", "tensor_parallel_size", "tp_size"], "parallel.tensor", "write it under [parallel]"),
    key(
        &["pp", "pipeline_parallel", "pipeline_parallel_size", "pp_size"],
        "parallel.pipeline",
        "write it under [parallel]",
    ),
    key(
        &["arch", "architecture", "model_type", "model_name", "model_name_or_path"],
        "model.kind",
        "`kolo list models` lists them",
    ),
    key(
        &["pretrained", "init_from", "weights", "checkpoint_path"],
        "model.from",
        "it names a run, a checkpoint or a file",
    ),
    key(&["n_layer", "n_layers", "num_layers", "num_hidden_layers", "depth"], "model.layers", "write it under [model]"),
    key(&["d_model", "n_embd", "hidden_size", "embed_dim", "embedding_dim"], "model.width", "write it under [model]"),
    key(&["n_head", "n_heads", "num_heads", "num_attention_heads"], "model.heads", "write it under [model]"),
    key(
        &["block_size", "seq_len", "sequence_length", "max_length", "max_seq_len", "context_length", "n_positions"],
        "model.context",
        "write it under [model]",
    ),
    key(&["n_vocab", "vocab_size"], "model.vocab", "write it under [model]"),
    key(
        &["n_classes", "num_classes", "num_labels"],
        "model.classes",
        "write it under [model]; by default the data say it",
    ),
    key(&["img_size", "image_size", "input_size"], "model.image", "write `image = [3, 32, 32]` under [model]"),
];

/// Names that differ in capitals, `-` and `_` alone are one.
fn plain(name: &str) -> String {
    name.chars().filter(|c| !matches!(c, '-' | '_')).flat_map(char::to_lowercase).collect()
}

/// What a job file says instead of this key, whose path is given.
fn hint(path: &str) -> Option<String> {
    let name = plain(path.rsplit('.').next()?);
    let is_named = |foreign: &&ForeignKey| foreign.names.iter().any(|known| plain(known) == name);
    let ForeignKey { here, how, .. } = FOREIGN_KEYS.iter().find(is_named).filter(|foreign| foreign.here != path)?;
    Some(format!("here that is `{here}`: {how}"))
}

/// The path of what a job file does not have: a key that nobody reads, a section, or a key outside of all sections.
fn unknown(error: &SettingError) -> Option<&str> {
    error.unknown_key().or_else(|| {
        let (name, what) = error.message.strip_prefix('`')?.split_once('`')?;
        [" is not a section of a job file", " is outside of any section"].contains(&what).then_some(name)
    })
}

/// Gives the error of an unknown key a better hint, if other libraries know the key.
pub(crate) fn explain(error: Error) -> Error {
    match error {
        Error::Setting(error) => {
            let hint = unknown(&error).and_then(hint).unwrap_or_else(|| error.hint.clone());
            Error::Setting(SettingError { hint, ..error })
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::Job;
    use crate::job_file;
    use kolo_models::MODELS;

    const JOBS: [&str; 4] = [
        "[model]\nkind = \"gpt\"\n[data]\nsource = \"synthetic:tokens\"\n[train]\noptimizer = { kind = \"adamw\" }\n\
         schedule = { kind = \"cosine\" }\nearly_stop = { metric = \"loss\" }\n",
        "[model]\nkind = \"cnn\"\n[data]\nsource = \"builtin:digits\"\n[train]\noptimizer = { kind = \"sgd\" }\n",
        "[model]\nkind = \"mlp\"\n[data]\nsource = \"builtin:digits\"\n[checkpoint]\nevery = \"1 epoch\"\n",
        "[model]\nkind = \"mlp\"\nfrom = \"runs/a\"\n[data]\nsource = \"builtin:digits\"\n",
    ];

    fn refused(job: &str) -> String {
        let root = job_file::parse(job, "job.toml").unwrap();
        Job::read(&root, MODELS).map(|_| ()).unwrap_err().to_string()
    }

    /// Every key that is named is one.
    #[test]
    fn hints_name_keys_that_there_are() {
        let mut known: Vec<String> = vec!["data.shuffle_buffer".into()];
        for job in JOBS {
            let root = job_file::parse(job, "job.toml").unwrap();
            Job::read(&root, MODELS).unwrap_or_else(|error| panic!("{error}"));
            known.extend(root.resolved().into_iter().map(|(key, _)| key));
        }
        for ForeignKey { names, here, how } in FOREIGN_KEYS {
            let is_key = known.iter().any(|key| key == here || key.starts_with(&format!("{here}.")));
            assert!(here.starts_with('-') || is_key, "{here}");
            assert!(!names.is_empty() && !how.is_empty());
        }
        let mut names: Vec<String> =
            FOREIGN_KEYS.iter().flat_map(|foreign| foreign.names).map(|name| plain(name)).collect();
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count, "a name stands for two keys");
    }

    #[test]
    fn a_key_of_another_library_is_told_in_our_words() {
        let job = |section: &str, key: &str| {
            let base = "[model]\nkind = \"mlp\"\n[data]\nsource = \"builtin:digits\"\n";
            match section {
                "data" => format!("{base}{key}\n"),
                section => format!("{base}[{section}]\n{key}\n"),
            }
        };
        let accumulate = refused(&job("train", "gradient_accumulation_steps = 4"));
        assert!(
            accumulate.starts_with(
                "job.toml:6: unknown key `train.gradient_accumulation_steps`\n  hint: here that is `data.grains`: \
                 `data.batch` is the whole batch of an update"
            ),
            "{accumulate}"
        );
        for (section, key, here) in [
            ("train", "learning-rate = 0.1", "train.optimizer.lr"),
            ("train", "batch_size = 4", "data.batch"),
            ("data", "epochs = 4", "train.epochs"),
            ("train", "seed = 4", "job.seed"),
            ("job", "numEpochs = 4", "train.epochs"),
            ("train", "device = \"cuda\"", "--device"),
        ] {
            let told = refused(&job(section, key));
            assert!(told.contains("unknown key `") && told.contains(&format!("here that is `{here}`: ")), "{told}");
        }
        // Outside of its section, or as one.
        let outside = refused(&format!("lr = 0.1\n{}", job("train", "epochs = 1")));
        assert!(
            outside.contains("`lr` is outside of any section\n  hint: here that is `train.optimizer.lr`"),
            "{outside}"
        );
        let section = refused(&format!("{}[optimizer]\nlr = 0.1\n", job("train", "epochs = 1")));
        assert!(section.contains("hint: here that is `train.optimizer`: write `optimizer = {"), "{section}");
        // A key of its own place that this kind does not have, and a typing error.
        let own = refused(&job("train", "optimizer = { kind = \"adamw\", momentum = 0.9 }"));
        assert!(own.contains("the keys here are "), "{own}");
        let mistyped = refused(&job("train", "epoch = 3"));
        assert!(mistyped.contains("did you mean `epochs`?"), "{mistyped}");
    }
}
