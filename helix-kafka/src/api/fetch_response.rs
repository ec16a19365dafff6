//! The response of Fetch, which leaves the records where they are.

use bytes::{BufMut, Bytes, BytesMut};

use crate::frame::{RequestHeader, ResponseFrame, finish_response, response_head};

/// Result of one partition.
#[derive(Debug, Default)]
pub(super) struct FetchedPartition {
    pub(super) index: i32,
    pub(super) error_code: i16,
    pub(super) high_watermark: i64,
    pub(super) log_start: i64,
    pub(super) records: Vec<Bytes>,
}

impl FetchedPartition {
    pub(super) fn records_len(&self) -> usize {
        self.records.iter().map(Bytes::len).sum()
    }
}

/// Chunks and the bytes that follow them.
struct ChunkedResponse {
    head: Option<BytesMut>,
    chunks: Vec<Bytes>,
    bytes: BytesMut,
    is_flexible: bool,
}

impl ChunkedResponse {
    fn tags(&mut self) {
        if self.is_flexible {
            self.bytes.put_u8(0);
        }
    }

    fn varint(&mut self, mut value: usize) {
        while value >= 0x80 {
            self.bytes.put_u8(u8::try_from(value & 0x7f).unwrap_or(0) | 0x80);
            value >>= 7;
        }
        self.bytes.put_u8(u8::try_from(value).unwrap_or(0));
    }

    fn length(&mut self, length: usize) {
        match self.is_flexible {
            true => self.varint(length + 1),
            false => self.bytes.put_i32(i32::try_from(length).unwrap_or(i32::MAX)),
        }
    }

    fn text(&mut self, text: &str) {
        match self.is_flexible {
            true => self.varint(text.len() + 1),
            // A name that came in a request fits.
            false => self.bytes.put_i16(i16::try_from(text.len()).unwrap_or(i16::MAX)),
        }
        self.bytes.put_slice(text.as_bytes());
    }

    fn null_list(&mut self) {
        match self.is_flexible {
            true => self.bytes.put_u8(0),
            false => self.bytes.put_i32(-1),
        }
    }

    /// Appends chunks without a copy.
    fn chunks(&mut self, chunks: Vec<Bytes>) {
        if chunks.is_empty() {
            return;
        }
        let before = std::mem::take(&mut self.bytes);
        match self.head {
            None => self.head = Some(before),
            Some(_) => self.chunks.push(before.freeze()),
        }
        self.chunks.extend(chunks);
    }
}

/// Encodes a response of versions 4 to 12.
///
/// # Errors
/// The response is larger than a length can state.
pub(super) fn encode_fetch_response(
    header: &RequestHeader,
    error_code: i16,
    topics: Vec<(String, Vec<FetchedPartition>)>,
) -> Result<ResponseFrame, String> {
    let version = header.version;
    let mut response = ChunkedResponse {
        head: None,
        chunks: Vec::new(),
        bytes: response_head(header),
        is_flexible: header.api.is_flexible(version),
    };
    response.bytes.put_i32(0);
    if version >= 7 {
        response.bytes.put_i16(error_code);
        // Fetch sessions are off.
        response.bytes.put_i32(0);
    }
    response.length(topics.len());
    for (name, partitions) in topics {
        response.text(&name);
        response.length(partitions.len());
        for partition in partitions {
            put_partition(&mut response, version, partition);
        }
        response.tags();
    }
    response.tags();
    let ChunkedResponse { head, mut chunks, bytes, .. } = response;
    match head {
        None => finish_response(bytes, chunks),
        Some(head) => {
            chunks.push(bytes.freeze());
            finish_response(head, chunks)
        }
    }
}

fn put_partition(response: &mut ChunkedResponse, version: i16, partition: FetchedPartition) {
    response.bytes.put_i32(partition.index);
    response.bytes.put_i16(partition.error_code);
    response.bytes.put_i64(partition.high_watermark);
    // The last stable offset: there are no transactions.
    response.bytes.put_i64(partition.high_watermark);
    if version >= 5 {
        response.bytes.put_i64(partition.log_start);
    }
    response.null_list();
    if version >= 11 {
        response.bytes.put_i32(-1);
    }
    response.length(partition.records_len());
    response.chunks(partition.records);
    response.tags();
}

#[cfg(test)]
mod tests {
    use kafka_protocol::messages::FetchResponse;
    use kafka_protocol::protocol::Decodable;

    use super::*;
    use crate::versions::served_api;

    #[test]
    fn clients_decode_every_version() {
        let api = served_api(1).unwrap();
        for version in api.min..=api.max {
            let header =
                RequestHeader { api, version, correlation_id: 7, client_id: String::new() };
            let partition = |index, records: &[&'static str]| FetchedPartition {
                index,
                error_code: 3,
                high_watermark: 9,
                log_start: 2,
                records: records.iter().map(|text| Bytes::from_static(text.as_bytes())).collect(),
            };
            let topics = vec![
                ("a".to_owned(), vec![partition(0, &["xy", "z"]), partition(1, &[])]),
                ("b".to_owned(), vec![partition(5, &["w"])]),
            ];
            let frame = encode_fetch_response(&header, 0, topics).unwrap();
            let mut bytes = Bytes::from(frame.chunks.concat());
            let length = usize::try_from(bytes::Buf::get_i32(&mut bytes)).unwrap();
            assert_eq!(length, bytes.len());
            assert_eq!(bytes::Buf::get_i32(&mut bytes), 7);
            if version >= 12 {
                assert_eq!(bytes::Buf::get_u8(&mut bytes), 0);
            }
            let response = FetchResponse::decode(&mut bytes, version).unwrap();
            assert!(bytes.is_empty());
            assert_eq!(response.responses.len(), 2);
            let first = &response.responses[0].partitions[0];
            assert_eq!(first.records.as_deref(), Some(&b"xyz"[..]));
            assert_eq!((first.high_watermark, first.error_code), (9, 3));
            assert!(response.responses[0].partitions[1].records.as_ref().unwrap().is_empty());
            assert_eq!(response.responses[1].partitions[0].partition_index, 5);
        }
    }
}
