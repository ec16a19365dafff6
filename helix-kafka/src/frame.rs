//! Frames of Kafka's protocol: a length of four bytes, then a request or a response.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use kafka_protocol::protocol::Encodable;

use crate::schema::{SchemaError, check_body, tagged_fields_len};
use crate::versions::{ServedApi, served_api};

/// Key of ApiVersions, whose unknown versions get an answer.
const API_VERSIONS_KEY: i16 = 18;

/// Header of a request.
#[derive(Debug, Clone)]
pub struct RequestHeader {
    /// API.
    pub api: &'static ServedApi,
    /// Version.
    pub version: i16,
    /// Number that the response repeats.
    pub correlation_id: i32,
    /// Name that the client gives itself; may be empty.
    pub client_id: String,
}

/// A request whose bytes fit its schema.
#[derive(Debug)]
pub struct CheckedRequest {
    /// Header.
    pub header: RequestHeader,
    /// Body.
    pub body: Bytes,
    /// Elements of all lists.
    pub elements: usize,
}

/// Reason to close a connection.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// The frame ends within its header.
    #[error("the frame has {0} bytes, less than a header")]
    Short(usize),
    /// The name of the client is not UTF-8 or ends beyond the frame.
    #[error("the client id is not valid")]
    ClientId,
    /// The gateway does not serve the API.
    #[error("API {key} is not served")]
    UnknownApi {
        /// Key.
        key: i16,
    },
    /// The gateway does not serve the version.
    #[error("version {version} of API {key} is not served; the versions are {min} to {max}")]
    UnknownVersion {
        /// Key.
        key: i16,
        /// Version.
        version: i16,
        /// First served one.
        min: i16,
        /// Last served one.
        max: i16,
    },
    /// ApiVersions with an unknown version; the client gets an answer and asks again.
    #[error("ApiVersions has an unknown version")]
    UnknownApiVersions {
        /// Number that the response repeats.
        correlation_id: i32,
    },
    /// The body does not fit its schema.
    #[error("the body of API {key}, version {version}: {error}")]
    Body {
        /// Key.
        key: i16,
        /// Version.
        version: i16,
        /// Defect.
        error: SchemaError,
    },
}

/// Checks a frame without its length.
///
/// # Errors
/// The reason to close the connection, except for `UnknownApiVersions`.
pub fn check_frame(mut frame: Bytes) -> Result<CheckedRequest, FrameError> {
    if frame.len() < 8 {
        return Err(FrameError::Short(frame.len()));
    }
    let (key, version, correlation_id) = (frame.get_i16(), frame.get_i16(), frame.get_i32());
    let Some(api) = served_api(key) else { return Err(FrameError::UnknownApi { key }) };
    if !api.serves(version) {
        let (min, max) = (api.min, api.max);
        return Err(match key {
            API_VERSIONS_KEY => FrameError::UnknownApiVersions { correlation_id },
            _ => FrameError::UnknownVersion { key, version, min, max },
        });
    }
    let client_id = client_id(&mut frame)?;
    let is_flexible = api.is_flexible(version);
    let body_error = |error| FrameError::Body { key, version, error };
    if is_flexible {
        let length = tagged_fields_len(&frame).map_err(body_error)?;
        frame.advance(length);
    }
    let elements = check_body(&frame, api.schema, version, is_flexible).map_err(body_error)?;
    let header = RequestHeader { api, version, correlation_id, client_id };
    Ok(CheckedRequest { header, body: frame, elements })
}

/// Reads the client's name. Its length has two bytes in every version.
fn client_id(frame: &mut Bytes) -> Result<String, FrameError> {
    if frame.len() < 2 {
        return Err(FrameError::ClientId);
    }
    let length = frame.get_i16();
    if length == -1 {
        return Ok(String::new());
    }
    let length = usize::try_from(length).map_err(|_| FrameError::ClientId)?;
    if length > frame.len() {
        return Err(FrameError::ClientId);
    }
    let text = frame.split_to(length);
    std::str::from_utf8(&text).map(str::to_owned).map_err(|_| FrameError::ClientId)
}

/// A response as it is written: chunks, of which the first begins with the length of all.
#[derive(Debug, Default)]
pub struct ResponseFrame {
    /// Chunks.
    pub chunks: Vec<Bytes>,
}

/// Returns the bytes before a response's body, with four bytes for the length first.
pub fn response_head(header: &RequestHeader) -> BytesMut {
    let mut head = BytesMut::with_capacity(256);
    head.put_i32(0);
    head.put_i32(header.correlation_id);
    // The header of ApiVersions never has tagged fields: its client may not know the versions yet.
    if header.api.is_flexible(header.version) && header.api.key as i16 != API_VERSIONS_KEY {
        head.put_u8(0);
    }
    head
}

/// Writes the length of a response into its first chunk.
///
/// # Errors
/// The response is larger than a length can state.
pub fn finish_response(mut head: BytesMut, rest: Vec<Bytes>) -> Result<ResponseFrame, String> {
    let total = head.len() - 4 + rest.iter().map(Bytes::len).sum::<usize>();
    let total = i32::try_from(total).map_err(|_| format!("a response has {total} bytes"))?;
    head[..4].copy_from_slice(&total.to_be_bytes());
    let mut chunks = vec![head.freeze()];
    chunks.extend(rest);
    Ok(ResponseFrame { chunks })
}

/// Encodes a response.
///
/// # Errors
/// The message has a value that its version cannot state.
pub fn encode_response(
    header: &RequestHeader,
    message: &impl Encodable,
) -> Result<ResponseFrame, String> {
    let mut bytes = response_head(header);
    message.encode(&mut bytes, header.version).map_err(|error| format!("{error:#}"))?;
    finish_response(bytes, Vec::new())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(key: i16, version: i16, rest: &[u8]) -> Bytes {
        let mut bytes = BytesMut::new();
        bytes.put_i16(key);
        bytes.put_i16(version);
        bytes.put_i32(7);
        bytes.put_slice(rest);
        bytes.freeze()
    }

    #[test]
    fn reads_headers_with_and_without_tagged_fields() {
        let request = check_frame(frame(18, 0, b"\0\x02me")).unwrap();
        assert_eq!(request.header.client_id, "me");
        assert_eq!((request.header.correlation_id, request.header.version), (7, 0));
        let request = check_frame(frame(18, 3, b"\xff\xff\0\x02a\x02b\0")).unwrap();
        assert_eq!(request.header.client_id, "");
        assert_eq!(request.body, &b"\x02a\x02b\0"[..]);
    }

    #[test]
    fn unknown_versions_of_api_versions_can_be_answered() {
        let error = check_frame(frame(18, 99, b"")).unwrap_err();
        assert_eq!(error, FrameError::UnknownApiVersions { correlation_id: 7 });
        let error = check_frame(frame(3, 99, b"")).unwrap_err();
        assert_eq!(error, FrameError::UnknownVersion { key: 3, version: 99, min: 0, max: 9 });
        assert_eq!(
            check_frame(frame(999, 0, b"")).unwrap_err(),
            FrameError::UnknownApi { key: 999 }
        );
    }

    #[test]
    fn rejects_hostile_headers() {
        for bytes in [&b""[..], b"\0\x12\0\0\0\0\0"] {
            assert!(matches!(check_frame(bytes.into()), Err(FrameError::Short(_))));
        }
        for rest in [&b"\0"[..], b"\0\x09me", b"\xff\xfe", b"\0\x01\xff"] {
            assert_eq!(check_frame(frame(18, 0, rest)).unwrap_err(), FrameError::ClientId);
        }
        // Two billion topics in nine bytes.
        let error = check_frame(frame(3, 9, b"\xff\xff\0\xff\xff\xff\xff\x07\0")).unwrap_err();
        assert!(error.to_string().contains("2147483646 elements"), "{error}");
    }
}
