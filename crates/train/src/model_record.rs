//! What a checkpoint says of its model: the job, how it sees its files, and the fields of its data.
//!
//! Shapes that a model took from the data are no keys of the job. The fields give them back without the data.

use crate::job::Job;
use kolo_data::{Field, Kind};
use serde_json::{Value, json};

const JOB: &str = "job";
const PREPROCESSING: &str = "preprocessing";
const FIELDS: &str = "fields";

/// The record of a job whose file is `text`.
pub fn model_record(job: &Job, text: &str) -> Value {
    let fields: Vec<Value> = job.source.fields().iter().map(to_json).collect();
    json!({ JOB: text, PREPROCESSING: job.source.preprocessing(), FIELDS: fields })
}

/// The job file of a record.
pub fn job_text(record: &Value) -> Option<&str> {
    record.get(JOB)?.as_str()
}

/// How the job sees its files, if it has any.
pub fn preprocessing(record: &Value) -> Option<&str> {
    record.get(PREPROCESSING)?.as_str()
}

/// The fields of the data that the model was made for. Records of earlier versions do not say them.
pub fn data_fields(record: &Value) -> Option<Vec<Field>> {
    record.get(FIELDS)?.as_array()?.iter().map(from_json).collect()
}

fn to_json(field: &Field) -> Value {
    let classes = match field.kind {
        Kind::Real => Value::Null,
        Kind::Index { classes } => json!(classes),
    };
    json!({ "name": field.name, "shape": field.shape, "classes": classes })
}

fn from_json(field: &Value) -> Option<Field> {
    let sizes = field.get("shape")?.as_array()?.iter().map(|size| size.as_u64().map(|size| size as usize));
    let (name, shape) = (field.get("name")?.as_str()?, sizes.collect::<Option<Vec<usize>>>()?);
    match field.get("classes")? {
        Value::Null => Some(Field::real(name, &shape)),
        classes => Some(Field::index(name, &shape, classes.as_u64().filter(|classes| *classes > 0)? as usize)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_come_back_as_they_were() {
        let fields = vec![Field::real("x", &[3, 2]), Field::index("y", &[], 7)];
        let record = json!({ FIELDS: fields.iter().map(to_json).collect::<Vec<_>>() });
        assert_eq!(data_fields(&record), Some(fields));
        let broken = json!({ FIELDS: [{ "name": "y", "shape": [], "classes": 0 }] });
        assert_eq!((data_fields(&broken), data_fields(&json!({}))), (None, None));
    }
}
