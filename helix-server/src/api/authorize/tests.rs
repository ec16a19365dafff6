//! Every method has a row, and the page of docs/ has the rows.

use std::collections::BTreeMap;

use prost::Message as _;

use super::*;
use crate::doc_tables::expect_table;

fn described() -> BTreeMap<String, bool> {
    let files = prost_types::FileDescriptorSet::decode(helix_proto::FILE_DESCRIPTOR_SET).unwrap();
    let mut methods = BTreeMap::new();
    for file in files.file.iter().filter(|file| file.package() == "helix.log.v1") {
        for service in &file.service {
            for method in &service.method {
                let is_stream = method.client_streaming() || method.server_streaming();
                let path = format!("{}.{}/{}", file.package(), service.name(), method.name());
                methods.insert(path, is_stream);
            }
        }
    }
    methods
}

#[test]
fn every_method_has_one_row() {
    let described = described();
    assert!(described.len() > 40);
    let rows: BTreeMap<String, bool> =
        METHODS.iter().map(|row| (row.method.to_owned(), row.kind == MethodKind::Stream)).collect();
    assert_eq!(rows, described, "a method without a row has no check; a stream is a stream");
    assert_eq!(rows.len(), METHODS.len());
    for row in METHODS {
        assert_eq!(method_row(&format!("/{}", row.method)), Some(row));
    }
    assert_eq!(method_row("/helix.log.v1.TopicService/Nothing"), None);
}

#[test]
fn only_probes_need_no_credentials() {
    assert!(is_open("/grpc.health.v1.Health/Check") && is_open("/grpc.health.v1.Health/Watch"));
    for path in ["/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", "/", "", "/x"] {
        assert!(!is_open(path), "{path}");
    }
    assert!(METHODS.iter().all(|row| !is_open(&format!("/{}", row.method))));
}

#[test]
fn the_page_of_access_has_every_method() {
    let head = "| call | rights |\n|---|---|\n";
    let rows = METHODS.iter().map(|row| {
        let (_, call) = row.method.rsplit_once('/').expect("a service and a method");
        format!("| {call} | {} |\n", row.rights)
    });
    expect_table("access.md", "the rights", head, rows);
}
