package upstream;

import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.atomic.AtomicReference;
import kafka.network.SocketServer;
import kafka.server.KafkaBroker;
import kafka.server.KafkaConfig;
import org.apache.kafka.metadata.BrokerState;
import org.mockito.Mockito;
import org.mockito.invocation.InvocationOnMock;
import org.mockito.stubbing.Answer;

/**
 * Mocks of the brokers outside, for tests that ask the brokers of their own process for ids and ports. A mock also
 * stops and starts its broker, and reads the broker's metadata. All other calls throw UnsupportedOperationException.
 *
 * <p>Only tests that {@code upstream.seen} names by class or method receive these mocks. Other tests receive no
 * brokers, so helpers that wait for all brokers of the process have nothing to wait for.
 */
public final class Seen {
    private static final Set<String> TESTS = Set.of(System.getProperty("upstream.seen", "").split(","));

    private Seen() {}

    /** Return whether this test sees the mocks. `test` is Class.method. */
    public static boolean by(String test) {
        return TESTS.contains(test) || TESTS.contains(test.substring(0, test.indexOf('.')));
    }

    /**
     * Return the brokers in the order of their ids. `settings` are the settings of the brokers that the test
     * configured, in the same order. The list may be empty if the test does not read them.
     */
    public static List<KafkaBroker> brokers(Outside outside, List<? extends Map<String, ?>> settings) {
        List<Integer> ports = outside.ports();
        List<KafkaBroker> brokers = new ArrayList<>();
        for (int index = 0; index < ports.size(); index++) {
            Map<String, ?> own = index < settings.size() ? settings.get(index) : Map.of();
            brokers.add(broker(outside, index, ports.get(index), own));
        }
        return brokers;
    }

    private static KafkaBroker broker(Outside outside, int index, int port, Map<String, ?> settings) {
        int number = outside.first() + index;
        KafkaConfig config = config(number, settings);
        AtomicReference<BrokerState> state = new AtomicReference<>(BrokerState.RUNNING);
        SocketServer server = Mockito.mock(SocketServer.class, (Answer<?>) asked -> switch (asked.getMethod().getName()) {
            case "boundPort" -> port;
            case "toString" -> "port " + port;
            default -> throw inside(asked);
        });
        return Mockito.mock(KafkaBroker.class, (Answer<?>) asked -> switch (asked.getMethod().getName()) {
            case "config" -> config;
            case "boundPort" -> port;
            case "socketServer" -> server;
            case "clusterId" -> outside.clusterId();
            case "metadataCache" -> SeenMetadata.cache(outside, asked.getMethod().getReturnType());
            case "dataPlaneRequestProcessor" -> processor(outside, number, asked.getMethod().getReturnType());
            case "brokerState" -> state.get();
            case "toString" -> "broker " + number + " outside";
            case "awaitShutdown" -> null;
            case "shutdown" -> {
                state.set(BrokerState.NOT_RUNNING);
                yield tell(outside, "stop", index);
            }
            case "startup" -> {
                tell(outside, "start", index);
                state.set(BrokerState.RUNNING);
                yield null;
            }
            default -> throw inside(asked);
        });
    }

    /** Return a mock of a broker's request processor. `type` is the processor's class in the tests' Kafka version. */
    private static Object processor(Outside outside, int number, Class<?> type) {
        return Mockito.mock(type, (Answer<?>) asked -> switch (asked.getMethod().getName()) {
            case "brokerId" -> number;
            case "clusterId" -> outside.clusterId();
            case "metadataCache" -> SeenMetadata.cache(outside, asked.getMethod().getReturnType());
            default -> throw inside(asked);
        });
    }

    private static Object tell(Outside outside, String action, int index) {
        outside.tell(action, index);
        return null;
    }

    /** Return a config with the given settings, or one that knows only the broker's id if there are no settings. */
    private static KafkaConfig config(int number, Map<String, ?> settings) {
        if (settings.isEmpty()) {
            return Mockito.mock(KafkaConfig.class, (Answer<?>) asked -> switch (asked.getMethod().getName()) {
                case "brokerId", "nodeId" -> number;
                case "toString" -> "settings of broker " + number;
                default -> throw inside(asked);
            });
        }
        Map<String, Object> own = new HashMap<>(settings);
        own.put("node.id", String.valueOf(number));
        own.computeIfPresent("broker.id", (name, id) -> String.valueOf(number));
        return new KafkaConfig(own);
    }

    private static UnsupportedOperationException inside(InvocationOnMock asked) {
        return new UnsupportedOperationException(asked.getMethod().getName() + " needs a broker in this process");
    }
}
