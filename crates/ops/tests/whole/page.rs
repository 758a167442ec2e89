//! The page of ops.

use kolo_ops::page::{markdown, sentence};

#[test]
fn the_page_is_what_the_registry_says() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/ops.md");
    let page = markdown();
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(path, &page).unwrap();
    }
    let written = std::fs::read_to_string(path).unwrap();
    let differs = written.lines().zip(page.lines()).position(|(written, page)| written != page);
    let hint = "write it anew with `UPDATE=1 cargo test -p kolo-ops --test rewrite page`";
    assert!(written == page, "docs/ops.md differs from line {:?} on; {hint}", differs.map(|at| at + 1));
}

#[test]
fn every_op_says_what_it_does() {
    for kind in kolo_ops::registry() {
        assert!(sentence(kind.doc).len() > 3, "{} has no doc comment", kind.name);
    }
}
