{{- define "trtspec.name" -}}
{{- .Release.Name | trunc 53 | trimSuffix "-" -}}
{{- end -}}

{{- define "trtspec.selector" -}}
app.kubernetes.io/name: trtspec
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "trtspec.labels" -}}
{{ include "trtspec.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{/* What is served by: the server of several nodes is that of the group's first pod. */}}
{{- define "trtspec.workload" -}}
{{- if gt (int .Values.nodes) 1 -}}
{apiVersion: leaderworkerset.x-k8s.io/v1, kind: LeaderWorkerSet, name: {{ include "trtspec.name" . }}}
{{- else -}}
{apiVersion: apps/v1, kind: Deployment, name: {{ include "trtspec.name" . }}}
{{- end -}}
{{- end -}}

{{/* What differs between the servers. ports: beside HTTP's. queue, steps: metrics to scale on, where they are exported. */}}
{{- define "trtspec.servers" -}}
trtspec:
  live: /v1/models
  ready: /health
  metrics: {path: /metrics, port: {{ .Values.port }}}
  queue: trtspec_queued_requests
  steps: trtspec_verify_steps_per_second
triton:
  live: /v2/health/live
  ready: /v2/health/ready
  metrics: {path: /metrics, port: 8002}
  ports: {grpc: 8001, metrics: 8002}
trtllm-serve:
  live: /health
  ready: /health
  metrics: {path: /prometheus/metrics, port: {{ .Values.port }}}
  queue: trtllm_num_requests_waiting
  steps: trtllm_verify_steps_per_second
{{- end -}}

{{- define "trtspec.server" -}}
{{- $servers := fromYaml (include "trtspec.servers" .) -}}
{{- if not (hasKey $servers .Values.server) -}}
{{- fail (printf "server: %s is none of %s" .Values.server (keys $servers | sortAlpha | join ", ")) -}}
{{- end -}}
{{- toYaml (get $servers .Values.server) -}}
{{- end -}}
