//! A loss that is no number stops the run before the weights are touched and names the culprit.

use crate::trainer;
use kolo_train::Error;

#[test]
fn a_nan_names_its_op_and_layer_and_leaves_the_weights() {
    let text = "[model]\nkind = \"mlp\"\nhidden = [8, 8]\n[data]\nsource = \"builtin:playground\"\nbatch = 32\n[train]\nsteps = 5\n";
    let mut trainer = trainer(text, 2, 2);
    trainer.step().unwrap();
    trainer.store_mut().values_mut("layers.1.weight").unwrap()[3] = f32::NAN;
    let before = trainer.store().snapshot();
    let error = trainer.step().unwrap_err();
    assert_eq!(before, trainer.store().snapshot(), "the update must not run");
    let Error::NotFinite { step, culprit, .. } = &error else { panic!("{error}") };
    assert_eq!(*step, 1);
    assert_eq!(culprit, "op `linear` in layer `layers.1`, forward pass");
    assert!(error.to_string().contains("lower the learning rate"), "{error}");
}
