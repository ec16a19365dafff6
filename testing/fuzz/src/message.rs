//! Generates requests from the descriptors of the API. An input chooses the fields and their
//! values, so that most requests are valid.

use std::collections::HashMap;

use bytes::Bytes;
use helix_proto::FILE_DESCRIPTOR_SET;
use helix_proto::batch;
use helix_proto::log::v1::Record;
use prost::Message;
use prost::encoding::{WireType, encode_key, encode_varint};
use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{DescriptorProto, FieldDescriptorProto, FileDescriptorSet};

use crate::input::Input;

/// Maximum nesting of messages.
const DEPTH_MAX: usize = 6;

const TEXTS: [&str; 12] = [
    "default",
    "default",
    "default",
    "made",
    "made-too",
    "",
    ".",
    "a/b",
    "127.0.0.1:1",
    "token",
    "\u{0}",
    "\u{10FFFF}e\u{301}",
];

pub(crate) struct ApiMethod {
    pub(crate) path: String,
    pub(crate) input: String,
    pub(crate) takes_many: bool,
}

pub(crate) struct ApiSchema {
    pub(crate) messages: HashMap<String, DescriptorProto>,
    enums: HashMap<String, Vec<i32>>,
    pub(crate) methods: Vec<ApiMethod>,
}

impl ApiSchema {
    pub(crate) fn from_descriptors() -> Self {
        let set = FileDescriptorSet::decode(FILE_DESCRIPTOR_SET).unwrap();
        let mut schema =
            Self { messages: HashMap::new(), enums: HashMap::new(), methods: Vec::new() };
        for file in set.file {
            let package = format!(".{}", file.package());
            for listed in file.enum_type {
                let numbers = listed.value.iter().map(|value| value.number()).collect();
                schema.enums.insert(format!("{package}.{}", listed.name()), numbers);
            }
            for service in &file.service {
                for method in &service.method {
                    schema.methods.push(ApiMethod {
                        path: format!("/{}.{}/{}", &package[1..], service.name(), method.name()),
                        input: method.input_type().to_owned(),
                        takes_many: method.client_streaming(),
                    });
                }
            }
            for message in file.message_type {
                schema.messages.insert(format!("{package}.{}", message.name()), message);
            }
        }
        assert!(schema.methods.len() > 20);
        schema
    }

    /// Generates a request of a method.
    pub(crate) fn request(&self, method: &ApiMethod, input: &mut Input<'_>) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.message(&method.input, input, 0, &mut bytes);
        bytes
    }

    fn message(&self, name: &str, input: &mut Input<'_>, depth: usize, out: &mut Vec<u8>) {
        if name == ".helix.log.v1.EncodedBatch" && !input.one_in(4) {
            return out.extend(batch::encode(&records(input)).encode_to_vec());
        }
        let Some(message) = self.messages.get(name) else { return };
        if depth >= DEPTH_MAX {
            return;
        }
        let mut oneofs = vec![false; message.oneof_decl.len()];
        for field in &message.field {
            let times = match (field.label(), input.u8()) {
                (_, 0..96) => 0,
                (Label::Repeated, by) => usize::from(by % 4),
                _ => 1,
            };
            // At most one field of a oneof: the parser keeps only the last one.
            if times > 0
                && let Some(place) = field.oneof_index
                && std::mem::replace(&mut oneofs[place as usize], true)
            {
                continue;
            }
            for _ in 0..times {
                self.field(field, input, depth, out);
            }
        }
    }

    fn field(
        &self,
        field: &FieldDescriptorProto,
        input: &mut Input<'_>,
        depth: usize,
        out: &mut Vec<u8>,
    ) {
        let number = field.number() as u32;
        let mut varint = |value: u64| {
            encode_key(number, WireType::Varint, out);
            encode_varint(value, out);
        };
        match field.r#type() {
            Type::Bool => varint(u64::from(input.u8() % 2)),
            Type::Enum => {
                let known = self.enums.get(field.type_name()).filter(|_| !input.one_in(8));
                varint(match known {
                    Some(known) => input.pick(known) as u64,
                    None => input.number(),
                });
            }
            Type::Uint32 if field.name() == "partition" => varint(input.below(3) as u64),
            Type::Int32 | Type::Int64 | Type::Uint32 | Type::Uint64 | Type::Sint32 => {
                varint(input.number());
            }
            Type::Fixed32 => {
                encode_key(number, WireType::ThirtyTwoBit, out);
                out.extend((input.number() as u32).to_le_bytes());
            }
            Type::Fixed64 => {
                encode_key(number, WireType::SixtyFourBit, out);
                out.extend(input.number().to_le_bytes());
            }
            Type::String => {
                let text = match input.u8() {
                    0..200 => input.pick(&TEXTS).to_owned(),
                    200..230 => String::from_utf8_lossy(input.some_bytes()).into_owned(),
                    _ => "x".repeat(usize::from(input.u16())),
                };
                delimited(number, text.as_bytes(), out);
            }
            Type::Bytes => delimited(number, input.some_bytes(), out),
            Type::Message => {
                let mut inner = Vec::new();
                self.message(field.type_name(), input, depth + 1, &mut inner);
                delimited(number, &inner, out);
            }
            other => panic!("type {other:?} is not supported by this generator; add it"),
        }
    }
}

pub(crate) fn delimited(number: u32, bytes: &[u8], out: &mut Vec<u8>) {
    encode_key(number, WireType::LengthDelimited, out);
    encode_varint(bytes.len() as u64, out);
    out.extend_from_slice(bytes);
}

/// Generates up to four records.
pub(crate) fn records(input: &mut Input<'_>) -> Vec<Record> {
    let count = 1 + input.below(4);
    let record =
        |_| Record { value: Some(Bytes::copy_from_slice(input.some_bytes())), ..Record::default() };
    (0..count).map(record).collect()
}
