//! Chains of elementwise ops.

use kolo_graph::{Builder, Type};
use kolo_ops::fuse::fuse_elementwise;
use kolo_ops::prelude::*;

#[test]
fn a_chain_becomes_one_op_and_shared_values_leave_it() {
    let builder = Builder::new();
    let x = builder.input("x", Type::f32([4, 3]));
    let bias = builder.input("bias", Type::f32([3]));
    let y = x.add(bias).relu();
    builder.output("y", y.scale(2.0));
    builder.output("z", y.sum_all());
    let graph = builder.finish().unwrap();
    let fused = fuse_elementwise(&graph);
    kolo_graph::verify::verify(&fused).unwrap();
    let ops: Vec<&str> = fused.nodes.iter().map(|node| node.op.name()).collect();
    assert_eq!(ops, ["input", "input", "fused", "sum"]);
    assert_eq!(fused.nodes[2].outputs.len(), 2);
}

#[test]
fn a_reader_in_between_keeps_ops_apart() {
    let builder = Builder::new();
    let x = builder.input("x", Type::f32([4, 4]));
    let y = x.relu();
    let product = y.matmul(x);
    builder.output("z", y.add(product));
    let graph = builder.finish().unwrap();
    let fused = fuse_elementwise(&graph);
    kolo_graph::verify::verify(&fused).unwrap();
    assert!(fused.nodes.iter().all(|node| node.op.name() != "fused"));
}
