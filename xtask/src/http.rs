//! A minimal HTTP/1.1 client on loopback, for tasks that measure a server: one kept-alive connection, raw bytes.
//!
//! For nothing else: it knows only the two ways in which our server ends a body, and no proxy, TLS or redirect.

use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// Longer than any of the server's limits.
const TIMEOUT: Duration = Duration::from_secs(150);

/// A connection to the server.
#[derive(Debug)]
pub(crate) struct Connection {
    stream: BufReader<TcpStream>,
}

/// The head of an answer.
#[derive(Debug)]
pub(crate) struct Head {
    pub(crate) status: u16,
    /// The length of a body that is not chunked.
    length: Option<usize>,
    /// Whether the server closes the connection after the answer.
    pub(crate) closes: bool,
}

/// A complete answer.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) body: Vec<u8>,
}

/// A request: POST of JSON, or GET if `body` is empty.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Request<'a> {
    pub(crate) path: &'a str,
    /// Additional header lines, each with its CRLF.
    pub(crate) headers: &'a str,
    pub(crate) body: &'a [u8],
}

impl<'a> Request<'a> {
    pub(crate) fn get(path: &'a str) -> Self {
        Self {
            path,
            ..Self::default()
        }
    }

    pub(crate) fn post(path: &'a str, body: &'a [u8]) -> Self {
        Self {
            path,
            headers: "Content-Type: application/json\r\n",
            body,
        }
    }
}

impl Connection {
    /// Connects.
    pub(crate) fn open(address: SocketAddr) -> io::Result<Self> {
        let stream = TcpStream::connect_timeout(&address, Duration::from_secs(10))?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        stream.set_write_timeout(Some(TIMEOUT))?;
        stream.set_nodelay(true)?;
        Ok(Self {
            stream: BufReader::new(stream),
        })
    }

    /// Sends a request in one piece.
    pub(crate) fn send(&mut self, request: Request<'_>) -> io::Result<()> {
        let Request {
            path,
            headers,
            body,
        } = request;
        let method = if body.is_empty() { "GET" } else { "POST" };
        let host = if headers.contains("Host: ") {
            ""
        } else {
            "Host: localhost\r\n"
        };
        let mut bytes = format!(
            "{method} {path} HTTP/1.1\r\n{host}{headers}Content-Length: {}\r\n\r\n",
            body.len()
        )
        .into_bytes();
        bytes.extend_from_slice(body);
        self.stream.get_mut().write_all(&bytes)
    }

    /// Sends raw bytes.
    pub(crate) fn send_raw(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.get_mut().write_all(bytes)
    }

    /// Reads the head of the next answer.
    pub(crate) fn head(&mut self) -> io::Result<Head> {
        let mut head = Head {
            status: 0,
            length: None,
            closes: false,
        };
        let mut line = String::new();
        loop {
            line.clear();
            if self.stream.read_line(&mut line)? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let text = line.trim_end();
            if text.is_empty() {
                return Ok(head);
            }
            if head.status == 0 {
                let status = text.split(' ').nth(1).and_then(|word| word.parse().ok());
                head.status = status.ok_or(io::ErrorKind::InvalidData)?;
            } else if let Some((name, value)) = text.split_once(": ") {
                if name.eq_ignore_ascii_case("content-length") {
                    head.length = value.parse().ok();
                } else if name.eq_ignore_ascii_case("connection") {
                    head.closes = value.eq_ignore_ascii_case("close");
                }
            }
        }
    }

    /// Reads the body after a head. Passes its pieces to `each`, which stops the reading by returning false.
    ///
    /// Returns whether the body was read to its end.
    pub(crate) fn body(
        &mut self,
        head: &Head,
        mut each: impl FnMut(&[u8]) -> bool,
    ) -> io::Result<bool> {
        let mut buffer = Vec::new();
        if let Some(length) = head.length {
            buffer.resize(length, 0);
            self.stream.read_exact(&mut buffer)?;
            return Ok(each(&buffer));
        }
        let mut line = String::new();
        loop {
            line.clear();
            if self.stream.read_line(&mut line)? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let length = usize::from_str_radix(line.trim_end(), 16);
            let length = length.map_err(|_| io::ErrorKind::InvalidData)?;
            buffer.resize(length + 2, 0);
            self.stream.read_exact(&mut buffer)?;
            if length == 0 {
                return Ok(true);
            }
            if !each(&buffer[..length]) {
                return Ok(false);
            }
        }
    }

    /// Sends a request and reads its answer. A server that refuses a body may close the connection before it has received all of
    /// it.
    pub(crate) fn exchange(&mut self, request: Request<'_>) -> io::Result<Answer> {
        let sent = self.send(request);
        let head = match (self.head(), sent) {
            (Ok(head), _) => head,
            (Err(_), Err(error)) | (Err(error), Ok(())) => return Err(error),
        };
        let mut body = Vec::new();
        self.body(&head, |piece| {
            body.extend_from_slice(piece);
            true
        })?;
        Ok(Answer {
            status: head.status,
            body,
        })
    }
}

/// Sends a request on its own connection.
pub(crate) fn exchange(address: SocketAddr, request: Request<'_>) -> io::Result<Answer> {
    Connection::open(address)?.exchange(request)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn bodies_are_read_in_both_ways_and_the_connection_is_kept() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let (mut stream, _) = listener.accept().unwrap();
                let mut request = [0; 16];
                assert!(stream.read(&mut request).unwrap() > 0);
                let answers = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi\
                    HTTP/1.1 503 No\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n";
                stream.write_all(answers.as_bytes()).unwrap();
                // Read the second request before closing the stream; otherwise the client sees a reset.
                while !matches!(stream.read(&mut request), Ok(0) | Err(_)) {}
            });
            let mut connection = Connection::open(address).unwrap();
            let first = connection.exchange(Request::get("/")).unwrap();
            assert_eq!((first.status, first.body), (200, b"hi".to_vec()));
            let second = connection.exchange(Request::post("/", b"{}")).unwrap();
            assert_eq!((second.status, second.body), (503, b"abcde".to_vec()));
        });
    }
}
