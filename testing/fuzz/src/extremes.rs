//! Calls to every method of the API with one extreme value each: the largest and smallest numbers,
//! unset fields, long texts. Each call ends with a response or with an error of the server.

use bytes::Bytes;
use helix_proto::batch;
use helix_proto::log::v1::{Batch, Record, batch::Form};
use helix_server::raft::seed_this_thread;
use prost::Message;
use prost::encoding::{WireType, encode_key, encode_varint};
use prost_types::FieldDescriptorProto;
use prost_types::field_descriptor_proto::{Label, Type};
use tonic::Code;

use crate::calls::{FuzzDisks, FuzzServer};
use crate::message::{ApiMethod, ApiSchema, delimited};

const DEPTH_MAX: usize = 5;

/// Numbers, also of signed types: a negative one is encoded as its complement.
const NUMBERS: [u64; 10] = [
    0,
    1,
    i32::MAX as u64,
    1 << 31,
    u32::MAX as u64,
    i64::MAX as u64,
    1 << 63,
    u64::MAX - 1,
    u64::MAX,
    i32::MIN as i64 as u64,
];

/// Lengths of texts and bytes: a name's limit, gRPC's smallest limits of trailers, and beyond.
const LENGTHS: [usize; 5] = [0, 250, 3_000, 20_000, 100_000];

/// Runs all cases; returns their number. `check` gets a name and a function that panics if the case
/// fails.
pub fn extremes(mut check: impl FnMut(&str, &mut dyn FnMut())) -> usize {
    let schema = ApiSchema::from_descriptors();
    let mut count = 0;
    for method in &schema.methods {
        let mut cases = Vec::new();
        schema.extremes(&method.input, 0, &mut |name, message| cases.push((name, message)));
        count += cases.len();
        for cases in cases.chunks(20) {
            let names = || cases.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>();
            let name = format!("{} with one of {:?}", method.path, names());
            // One server for several cases: opening it takes longer than a call.
            check(&name, &mut || run(&schema, method, cases));
        }
    }
    count
}

fn run(schema: &ApiSchema, method: &ApiMethod, cases: &[(String, Vec<u8>)]) {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build();
    seed_this_thread(1);
    let calls = async {
        let server = FuzzServer::open(&FuzzDisks::default()).await;
        for (name, message) in cases {
            for messages in schema.conversations(method, message) {
                let (code, text, _) = server.send(&method.path, &messages).await;
                let is_refused = match code {
                    Code::Unknown | Code::DataLoss | Code::Cancelled => false,
                    Code::Internal => text.contains("decode"),
                    _ => true,
                };
                assert!(is_refused, "{} with {name}: {code:?}, {text}", method.path);
            }
        }
        server.node.close().await;
    };
    runtime.unwrap().block_on(calls);
}

impl ApiSchema {
    /// Returns the messages of the calls that contain `message`.
    fn conversations(&self, method: &ApiMethod, message: &[u8]) -> Vec<Vec<Vec<u8>>> {
        if !method.takes_many {
            return vec![vec![message.to_vec()]];
        }
        // The first message of a stream opens it.
        let opening = self.messages[&method.input].field.iter().find(|it| it.name() == "init");
        let init = opening.map_or_else(Vec::new, |field| self.plausible_field(field));
        vec![vec![message.to_vec()], vec![init, message.to_vec()]]
    }

    /// Passes every message of this type with one extreme value to `add`, with the field's path.
    fn extremes(&self, name: &str, depth: usize, add: &mut dyn FnMut(String, Vec<u8>)) {
        let Some(message) = self.messages.get(name) else { return };
        for field in &message.field {
            // The value replaces that of a valid message.
            let rest: Vec<u8> = message
                .field
                .iter()
                .filter(|it| it.name() != field.name())
                .flat_map(|it| self.plausible_field(it))
                .collect();
            let mut put = |path: String, bytes: &[u8]| {
                let path = if path.is_empty() {
                    field.name().to_owned()
                } else {
                    format!("{}.{path}", field.name())
                };
                add(path, [&rest[..], bytes].concat());
            };
            match field.r#type() {
                Type::Message => {
                    put(String::new(), &[]);
                    let mut empty = Vec::new();
                    delimited(field.number() as u32, &[], &mut empty);
                    put(String::new(), &empty);
                    if depth < DEPTH_MAX {
                        self.extremes(field.type_name(), depth + 1, &mut |path, inner| {
                            let mut bytes = Vec::new();
                            delimited(field.number() as u32, &inner, &mut bytes);
                            put(path, &bytes);
                        });
                    }
                }
                _ => scalars(field).iter().for_each(|bytes| put(String::new(), bytes)),
            }
        }
        // Both parts of a time.
        if let ".google.protobuf.Duration" | ".google.protobuf.Timestamp" = name {
            for seconds in [i64::MIN, i64::MIN + 1, -1, 0, i64::MAX] {
                for nanos in [i32::MIN, -1, 1, i32::MAX] {
                    let time = prost_types::Duration { seconds, nanos };
                    add(format!("{seconds}s {nanos}ns"), time.encode_to_vec());
                }
            }
        }
    }

    /// Returns a field with a valid value, so that a check of another field is reached.
    fn plausible_field(&self, field: &FieldDescriptorProto) -> Vec<u8> {
        let mut bytes = Vec::new();
        let number = field.number() as u32;
        match (field.r#type(), field.name()) {
            (Type::String, "topic" | "name") => delimited(number, b"default", &mut bytes),
            (Type::Uint32, "partition_count") => {
                encode_key(number, WireType::Varint, &mut bytes);
                encode_varint(2, &mut bytes);
            }
            (Type::Message, "batch") if field.type_name() == ".helix.log.v1.Batch" => {
                let record = Record { value: Some(Bytes::from_static(b"x")), ..Record::default() };
                let batch = Batch { form: Some(Form::Encoded(batch::encode(&[record]))) };
                delimited(number, &batch.encode_to_vec(), &mut bytes);
            }
            (Type::Message, "partitions" | "init") => {
                let inner = self.plausible(field.type_name());
                delimited(number, &inner, &mut bytes);
            }
            // Offset 0.
            (Type::Message, "start" | "position") => delimited(number, &[0x08, 0], &mut bytes),
            _ => {}
        }
        bytes
    }

    fn plausible(&self, name: &str) -> Vec<u8> {
        let fields = self.messages.get(name).map(|message| &message.field[..]).unwrap_or_default();
        fields.iter().flat_map(|field| self.plausible_field(field)).collect()
    }
}

/// Returns the encoded extreme values of a field that is not a message.
fn scalars(field: &FieldDescriptorProto) -> Vec<Vec<u8>> {
    let number = field.number() as u32;
    let key = |wire_type| {
        let mut bytes = Vec::new();
        encode_key(number, wire_type, &mut bytes);
        bytes
    };
    let mut values: Vec<Vec<u8>> = match field.r#type() {
        Type::Fixed32 => {
            let encode = |value| [key(WireType::ThirtyTwoBit), (value as u32).to_le_bytes().into()];
            NUMBERS.into_iter().map(|value| encode(value).concat()).collect()
        }
        Type::Fixed64 => {
            let encode = |value: u64| [key(WireType::SixtyFourBit), value.to_le_bytes().into()];
            NUMBERS.into_iter().map(|value| encode(value).concat()).collect()
        }
        Type::String | Type::Bytes => {
            let text = |text: &[u8]| {
                let mut bytes = Vec::new();
                delimited(number, text, &mut bytes);
                bytes
            };
            // Control characters and those of other scripts are escaped in messages.
            let unit = ["x".as_bytes(), "\u{1}".as_bytes(), "\u{10FFFF}".as_bytes()];
            unit.iter()
                .flat_map(|unit| LENGTHS.map(|length| text(&unit.repeat(length / unit.len()))))
                .collect()
        }
        _ => {
            let encode = |value| {
                let mut bytes = key(WireType::Varint);
                encode_varint(value, &mut bytes);
                bytes
            };
            NUMBERS.into_iter().map(encode).collect()
        }
    };
    if field.label() == Label::Repeated {
        let many = values.iter().flat_map(|value| value.repeat(3)).collect();
        values.push(many);
    }
    values
}
