//! Targets for what clients of the Kafka gateway send. What passes its checks is decoded without a
//! panic and without more memory than the checks allow.

use bytes::Bytes;
use helix_client::proto::batch;
use helix_client::proto::kafka::{KAFKA_HEADER_BYTES, KafkaBatch};
use helix_kafka::batch::check_produced;
use helix_kafka::frame::check_frame;
use helix_kafka::schema::ELEMENTS_MAX;
use kafka_protocol::messages::RequestKind;

/// Target `kafka_frame`: a request without its length.
pub(crate) fn frame(input: &[u8]) {
    let Ok(request) = check_frame(Bytes::copy_from_slice(input)) else { return };
    assert!(request.elements <= ELEMENTS_MAX.min(input.len()), "{} elements", request.elements);
    let header = &request.header;
    assert!(header.api.serves(header.version));
    let mut body = request.body.clone();
    // A value may still be out of the field's range.
    let decoded = RequestKind::decode(header.api.key, &mut body, header.version);
    if decoded.is_ok() {
        assert!(body.is_empty(), "{} bytes are left of {:?}", body.len(), header.api.key);
    }
}

/// Target `kafka_produce`: a record batch, whose length and checksum are made right.
pub(crate) fn produce(input: &[u8]) {
    let mut bytes = input.to_vec();
    if bytes.len() >= KAFKA_HEADER_BYTES {
        let length = i32::try_from(bytes.len() - 12).unwrap();
        bytes[8..12].copy_from_slice(&length.to_be_bytes());
        let crc = crc32c::crc32c(&bytes[21..]);
        bytes[17..21].copy_from_slice(&crc.to_be_bytes());
    }
    let Ok(produced) = check_produced(Some(bytes.into())) else { return };
    let stored = &produced.batch;
    assert!(batch::is_intact(stored));
    let kafka = KafkaBatch::parse(&stored.payload).expect("an accepted batch is a Kafka batch");
    kafka.check_appendable().expect("an accepted batch can be appended");
    assert_eq!(kafka.record_count(), stored.record_count);
    assert_eq!(produced.sequence.is_some(), produced.producer.is_some());
}
