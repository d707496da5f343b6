package upstream;

import com.yammer.metrics.core.Gauge;
import com.yammer.metrics.core.MetricName;
import java.io.IOException;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse.BodyHandlers;
import org.apache.kafka.server.metrics.KafkaYammerMetrics;

/** Metrics that a test reads in its own process. Their values come from the metrics of the brokers outside. */
public final class Meters {
    private static final MetricName KILLED =
            new MetricName("kafka.network", "SocketServer", "ExpiredConnectionsKilledCount");
    private static final String KILLED_OUTSIDE = "sluice_expired_connections_killed_total";

    private Meters() {}

    /** Register the count of connections that brokers closed because a client had not re-authenticated in time. */
    public static void bind() {
        KafkaYammerMetrics.defaultRegistry().newGauge(KILLED, new Gauge<Double>() {
            @Override
            public Double value() {
                double sum = 0;
                for (String address : Outside.metrics()) {
                    sum += of(address);
                }
                return sum;
            }
        });
    }

    private static double of(String address) {
        try {
            HttpRequest asked = HttpRequest.newBuilder(URI.create(address + "/metrics")).build();
            return HttpClient.newHttpClient().send(asked, BodyHandlers.ofString()).body().lines()
                    .filter(line -> line.startsWith(KILLED_OUTSIDE))
                    .mapToDouble(line -> Double.parseDouble(line.substring(line.lastIndexOf(' ') + 1)))
                    .sum();
        } catch (IOException | InterruptedException error) {
            throw new IllegalStateException(error);
        }
    }
}
