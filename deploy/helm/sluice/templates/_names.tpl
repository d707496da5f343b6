{{- define "sluice.name" -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "sluice.labels" -}}
app.kubernetes.io/name: sluice
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- /* The protocol of the listeners for clients. */ -}}
{{- define "sluice.protocol" -}}
{{- if .Values.tls.secretName -}}SSL{{- else -}}PLAINTEXT{{- end -}}
{{- end -}}
