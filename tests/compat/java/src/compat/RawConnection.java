package compat;

import java.io.DataInputStream;
import java.io.DataOutputStream;
import java.io.IOException;
import java.net.Socket;
import java.nio.ByteBuffer;
import java.util.function.BiFunction;
import org.apache.kafka.common.message.RequestHeaderData;
import org.apache.kafka.common.message.ResponseHeaderData;
import org.apache.kafka.common.protocol.ApiKeys;
import org.apache.kafka.common.protocol.ApiMessage;
import org.apache.kafka.common.protocol.ByteBufferAccessor;
import org.apache.kafka.common.protocol.ObjectSerializationCache;
import org.apache.kafka.common.protocol.Readable;

/** A connection that sends the library's own messages, one at a time, at versions that the caller chooses. */
final class RawConnection implements AutoCloseable {
    private static final int TIMEOUT_MS = 20_000;

    private final Socket socket;
    private final DataOutputStream out;
    private final DataInputStream in;
    private int correlationId;

    RawConnection(String bootstrap) throws IOException {
        int colon = bootstrap.lastIndexOf(':');
        socket = new Socket(bootstrap.substring(0, colon), Integer.parseInt(bootstrap.substring(colon + 1)));
        socket.setTcpNoDelay(true);
        socket.setSoTimeout(TIMEOUT_MS);
        out = new DataOutputStream(socket.getOutputStream());
        in = new DataInputStream(socket.getInputStream());
    }

    /** Send a request, and return its response as `read` parses it. Throw an AssertionError if bytes are left over. */
    <T> T call(ApiKeys api, int version, ApiMessage request, BiFunction<Readable, Short, T> read) throws IOException {
        RequestHeaderData header = new RequestHeaderData()
                .setRequestApiKey(api.id)
                .setRequestApiVersion((short) version)
                .setCorrelationId(++correlationId)
                .setClientId(Clients.CLIENT_ID);
        short headerVersion = api.requestHeaderVersion((short) version);
        ObjectSerializationCache cache = new ObjectSerializationCache();
        int size = header.size(cache, headerVersion) + request.size(cache, (short) version);
        ByteBufferAccessor frame = new ByteBufferAccessor(ByteBuffer.allocate(4 + size));
        frame.writeInt(size);
        header.write(frame, cache, headerVersion);
        request.write(frame, cache, (short) version);
        out.write(frame.buffer().array());
        out.flush();
        byte[] answer = new byte[in.readInt()];
        in.readFully(answer);
        ByteBufferAccessor body = new ByteBufferAccessor(ByteBuffer.wrap(answer));
        Check.equal(
                new ResponseHeaderData(body, api.responseHeaderVersion((short) version)).correlationId(),
                correlationId,
                "the correlation id");
        T response = read.apply(body, (short) version);
        Check.equal(body.remaining(), 0, "bytes left over after " + api + " " + version);
        return response;
    }

    @Override
    public void close() throws IOException {
        socket.close();
    }
}
